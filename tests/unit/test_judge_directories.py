"""The directories that answers leave behind: their disk usage and their removal."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eval_pipeline.judge import sandbox
from eval_pipeline.judge.inside import usage
from eval_pipeline.judge.inside.usage import MAX_FILES, directory_usage, remove_tree

DEEP = 1100
"""Directories in one another: more than Python recurses."""
FILLED = DEEP + 3 * DEEP // 100
NOBODY = 65534


@pytest.fixture
def tree() -> Iterator[Path]:
    """A directory that any user can reach, owned by `nobody` if the tests run as root."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))  # where removing thousands of directories is fast
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    yield path
    if path.exists():
        remove_tree(str(path))


def run_as_non_root(work: Callable[[], None]) -> bool:
    """Run a function in a non-root process, because root ignores modes; returns whether it succeeded."""
    if (pid := os.fork()) == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def fill(tree: Path) -> None:
    """Nest directories deeper than Python's recursion limit, with files and links, and remove permissions."""
    fd = os.open(tree, os.O_RDONLY)
    for number in range(DEEP):
        os.mkdir("nested", dir_fd=fd)
        below = os.open("nested", os.O_RDONLY, dir_fd=fd)
        if number % 100 == 0:
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=below))
            os.symlink("/etc", "link", dir_fd=below)
            os.mkdir("shut", 0, dir_fd=below)
        if number > 0:
            os.fchmod(fd, (0, 0o300, 0o500, 0o700)[number % 4])
        os.close(fd)
        fd = below
    os.close(fd)


def test_removes_directories_of_any_depth_and_mode(tree: Path) -> None:
    """As a non-root owner; links are not followed."""
    assert run_as_non_root(lambda: fill(tree))
    assert run_as_non_root(lambda: remove_tree(str(tree)))
    assert not tree.exists() and Path("/etc/passwd").exists()


def test_usage_counts_each_file_once(tree: Path) -> None:
    """Every file and directory counts, and the blocks of each file once."""
    assert directory_usage(str(tree)) == directory_usage(str(tree / "missing")) == (0, 0)
    assert run_as_non_root(lambda: fill(tree))
    assert directory_usage(str(tree)) == (FILLED, 0)
    (tree / "file").write_bytes(bytes(1 << 20))
    os.link(tree / "file", tree / "same")
    num_files, num_bytes = directory_usage(str(tree))
    assert num_files == FILLED + 2 and 1 << 20 <= num_bytes < 2 << 20


def test_usage_stops_counting_beyond_limit(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories nested deeper than this process may open files exceed the limit."""
    monkeypatch.setattr(usage, "MAX_FILES", 3)
    for number in range(9):
        (tree / str(number)).touch()
    assert directory_usage(str(tree))[0] == 4
    monkeypatch.undo()
    assert run_as_non_root(lambda: fill(tree))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, limits[1]))
    try:
        assert directory_usage(str(tree))[0] == MAX_FILES + 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_unremovable_directory_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The clean-up continues with the next directory."""
    zygote = os.getpid()
    made = [Path(tempfile.mkdtemp(prefix=f"judge_{zygote}_", dir="/tmp")) for _ in range(2)]

    def remove_or_fail(path: str) -> None:
        if path == str(made[0]):
            raise PermissionError(1, "Operation not permitted")
        remove_tree(path)

    monkeypatch.setattr(sandbox, "remove_tree", remove_or_fail)
    sandbox.remove_directories(zygote)
    assert [path.exists() for path in made] == [True, False]
    made[0].rmdir()
    warned = capsys.readouterr().err
    assert str(made[0]) in warned and "not permitted" in warned and str(made[1]) not in warned
