"""Hostile answers at the levels without namespaces: what these promise to contain is contained, and nothing is left."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval_pipeline.judge.client import JudgeServer
from eval_pipeline.judge.limits import Limits
from tests.helpers.hostile_answers import FUNCTIONS, PROGRAMS, RIGHT
from tests.integration.test_judge_hostile import LIMITS, function, limits_of, processes_of, script, until_settled
from verl_ext.errors import UserError

PROMISED_BY_NAMESPACES = (
    "kill everybody",
    "limit its parent",
    "/proc",
    "a /proc of its own",
    "hidden shared memory",
    "writing outside",
    "symbolic links",
    "disk filler",
    "disk filler with empty files",
    "memory bomb of many processes",
    "fork bomb",
    "fork bomb that catches",
    "thread bomb",
)
"""They write in /tmp, look at other processes, or need a count of tasks that the kernel keeps."""
HERE = {name: case for name, case in FUNCTIONS.items() if name not in PROMISED_BY_NAMESPACES}
LASTING_PER_WORKER = 2
DAEMONS = {
    "does not wait": (
        "import os, time\ndef f(x):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            time.sleep(1000)\n        os._exit(0)\n    return 2 * x\n"
    ),
    "ten": (
        "import os, time\ndef f(x):\n  for _ in range(10):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        if os.fork() == 0: time.sleep(1000)\n        os._exit(0)\n  return 2 * x\n"
    ),
    "a child": "import os, time\ndef f(x):\n    if os.fork() == 0: time.sleep(1000)\n    return 2 * x\n",
}
KILLS_ITS_SUPERVISOR = (
    "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(1000)\n"
    "open('left', 'w').close()\nos.kill(os.getppid(), 9)\ntime.sleep(1000)\n"
)


@pytest.fixture(scope="module", params=["sandlock", "rlimits"])
def server(request: pytest.FixtureRequest) -> Iterator[JudgeServer]:
    """A server at each of these levels, after which nothing may be left."""
    try:
        server = JudgeServer(request.param, num_workers=2, limits=LIMITS).__enter__()
    except UserError as error:
        pytest.skip(f"{request.param} does not work on this machine: {error}")
    yield server
    server.__exit__(None, None, None)
    assert until_settled(server, most=0) == 0


def directories_of(server: JudgeServer) -> list[Path]:
    """Temporary directories of answers that this server's zygotes had run."""
    zygotes = {str(pid) for pid in processes_of(server)}
    return [path for path in Path("/tmp").glob("judge_*_*") if path.name.split("_")[1] in zygotes]


def left_of(server: JudgeServer) -> list[str]:
    """What is there beside the processes that fork: after at most a minute, as verdicts do not wait for its removal."""
    for _ in range(600):
        processes, directories = processes_of(server), directories_of(server)
        if len(processes) <= 2 * LASTING_PER_WORKER and not directories:
            return []
        time.sleep(0.1)
    return [f"{len(processes)} processes", *map(str, directories)]


def abandoned() -> set[Path]:
    """Temporary directories of answers whose zygote is gone."""
    return {path for path in Path("/tmp").glob("judge_*_*") if not Path("/proc", path.name.split("_")[1]).exists()}


@pytest.mark.parametrize("name", HERE)
def test_hostile_function(server: JudgeServer, name: str) -> None:
    """Its own verdict, and a right answer after it is `success`."""
    program, expected = HERE[name]
    verdict = server.submit(function(program), limits_of(name)).result(timeout=300)
    assert verdict.error_type in expected.split("|"), verdict.message
    assert server.submit(function(RIGHT)).result(timeout=60).error_type == "success"
    assert left_of(server) == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_hostile_program(server: JudgeServer, name: str) -> None:
    """Its own verdict."""
    program, expected = PROGRAMS[name]
    verdict = server.submit(script(program)).result(timeout=60)
    assert verdict.error_type in expected.split("|"), verdict.message
    assert left_of(server) == []


def test_modes_and_times_of_files(server: JudgeServer, tmp_path: Path) -> None:
    """Where files are promised, whoever owns one cannot even change what is beside its content."""
    if server.isolation == "rlimits":
        pytest.skip("it promises no files")
    victim = tmp_path / "victim"
    victim.write_text("text")
    os.setxattr(victim, "user.kept", b"1")
    before = victim.stat()
    calls = ("chmod(p, 0)", "chown(p, 65534, 65534)", "utime(p, (1, 1))", "setxattr(p, 'user.x', b'1')")
    calls += ("lchown(p, 65534, 65534)", "removexattr(p, 'user.kept')")
    for call in calls:
        program = f"import os\np = {str(victim)!r}\ntry: os.{call}\nexcept OSError: pass\n{RIGHT}"
        assert server.submit(function(program)).result(timeout=60).error_type == "success"
    after = victim.stat()
    assert (after.st_mode, after.st_uid, after.st_mtime) == (before.st_mode, before.st_uid, before.st_mtime)
    assert os.listxattr(victim) == ["user.kept"]


def test_daemons(server: JudgeServer) -> None:
    """Right answers that leave processes are right, however often; none of the processes outlives its test."""
    programs = itertools.islice(itertools.cycle(DAEMONS.values()), 60)
    futures = [server.submit(function(program), Limits(cpu_s=5, wall_s=60)) for program in programs]
    verdicts = [future.result(timeout=600) for future in futures]
    assert {(verdict.error_type, verdict.message) for verdict in verdicts} == {("success", "")}
    assert left_of(server) == []


def test_killed_supervisor(server: JudgeServer) -> None:
    """The sandbox is replaced; what the answer left is ended and removed with it."""
    before = abandoned()
    verdict = server.submit(function(KILLS_ITS_SUPERVISOR)).result(timeout=120)
    assert verdict.error_type in ("api_error", "runtime_error", "timeout")
    assert server.submit(function(RIGHT)).result(timeout=60).error_type == "success"
    assert left_of(server) == []
    assert abandoned() <= before
