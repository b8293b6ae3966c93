"""Hostile answers at the isolation levels without namespaces: each contains what it promises and leaves nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval_pipeline.judge import JudgeClient
from tests.helpers.hostile_answers import FUNCTIONS_ON_HOST, RIGHT, TEST
from tests.helpers.judge import (
    HOSTILE_LIMITS,
    check_daemons,
    check_hostile,
    check_killed_supervisor,
    function,
    judged,
    serving,
    until_settled,
    wait_until_nothing_is_left,
)

TELLING = (
    *("data in the sockets of many processes", "larger buffers of sockets and pipes"),
    *("memory bomb", "memory behind a file descriptor", "memory of its parent", "scan of memory"),
    *("daemon", "stop itself", "loop with all signals blocked"),
    *("lease of a file that others open", "datagrams to paths"),
    *("disk filler", "disk filler with deleted files", "disk filler with empty files"),
    *("files in a directory that it cannot list", "nested directories"),
)
"""One answer for each kind of memory, process and file access that these levels must contain."""
SEEDED = random.Random(26).sample([name for name in FUNCTIONS_ON_HOST if name not in TELLING], 3)
PROGRAMS = ("daemon that goes on printing", "leaves a stopped child")


@pytest.fixture(scope="module", params=["sandlock", "rlimits"])
def server(request: pytest.FixtureRequest) -> Iterator[JudgeClient]:
    """A server at each of these levels; no process of it may remain at the end."""
    with serving(request.param, 2, HOSTILE_LIMITS) as server:
        yield server
    assert until_settled(server, max_processes=0) == 0


@pytest.mark.parametrize("name", [*TELLING, *SEEDED, *PROGRAMS])
def test_hostile_answer_is_contained(server: JudgeClient, name: str) -> None:
    check_hostile(server, name)
    wait_until_nothing_is_left(server)


FLAGS = """
import array, fcntl, os
try:
    file, flags = os.open(p, os.O_RDONLY), array.array("l", [0])
    fcntl.ioctl(file, 0x80086601, flags, True)  # FS_IOC_GETFLAGS
    flags[0] ^= 0x80  # no access times
    fcntl.ioctl(file, 0x40086602, flags)  # FS_IOC_SETFLAGS
    raise RuntimeError("it has changed the flags")
except OSError as error:
    assert error.errno == 25, error
"""


def test_protected_files_keep_mode_owner_times_and_attributes(server: JudgeClient, tmp_path: Path) -> None:
    """Not even the owner of a protected file can change them, and no attribute can be read."""
    if server.isolation == "rlimits":
        pytest.skip("this level does not protect files")
    victim = tmp_path / "victim"
    victim.write_text("text")
    os.setxattr(victim, "user.kept", b"1")
    before = victim.stat()
    calls = ("chmod(p, 0)", "chown(p, 65534, 65534)", "utime(p, (1, 1))", "setxattr(p, 'user.x', b'1')")
    calls += ("lchown(p, 65534, 65534)", "removexattr(p, 'user.kept')")
    for call in calls:
        program = f"import os\np = {str(victim)!r}\ntry: os.{call}\nexcept OSError: pass\n{RIGHT}"
        assert judged(server, function(program, TEST))[0] == "success"
    for call in ("getxattr(p, 'user.kept')", "listxattr(p)"):
        program = f"import os\np = {str(victim)!r}\nos.{call}\n{RIGHT}"
        assert judged(server, function(program, TEST))[0] == "runtime_error"
    # a file that answers may open
    assert judged(server, function(f"p = {os.__file__!r}\n{FLAGS}{RIGHT}", TEST)) == ("success", "")
    after = victim.stat()
    assert (after.st_mode, after.st_uid, after.st_mtime) == (before.st_mode, before.st_uid, before.st_mtime)
    assert os.listxattr(victim) == ["user.kept"]


def test_daemons_are_killed(server: JudgeClient) -> None:
    check_daemons(server, 20)


def test_killed_supervisor_is_replaced(server: JudgeClient) -> None:
    check_killed_supervisor(server)
