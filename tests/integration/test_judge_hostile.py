"""Hostile answers are contained and judged, and leave nothing behind."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval_pipeline.judge.client import JudgeServer
from eval_pipeline.judge.limits import Limits
from eval_pipeline.judge.submission import Submission
from eval_pipeline.problems.problem import Case, FunctionTests, ProgramTests
from tests.helpers.hostile_answers import FUNCTIONS, PROGRAMS, RIGHT, TEST
from verl_ext.errors import UserError

LIMITS = Limits(cpu_s=0.5, wall_s=3, memory_mb=256, file_mb=4, num_processes=32)
LASTING_PER_WORKER = 9
"""Two of bubblewrap's in each of two sandboxes, the process that forks testers, the one that forks supervisors, the one
that is first in the namespace of the latter, a supervisor and a tester."""
AMPLE = Limits(cpu_s=20, wall_s=120, memory_mb=512)
"""For answers whose verdict comes after some work."""
NEEDS_AMPLE = ("scan of memory", "deep recursion", "deep result", "huge result")


@pytest.fixture(scope="module")
def server() -> Iterator[JudgeServer]:
    """A server with namespaces."""
    try:
        server = JudgeServer("bwrap", num_workers=2, limits=LIMITS).__enter__()
    except UserError as error:
        pytest.skip(f"bwrap does not work on this machine: {error}")
    yield server
    server.__exit__(None, None, None)


def function(program: str) -> Submission:
    """An answer that is called."""
    return Submission(program, FunctionTests("f", (TEST,)))


def script(program: str) -> Submission:
    """An answer that is run."""
    return Submission(program, ProgramTests((Case("3\n", "6\n"),)))


def limits_of(name: str) -> Limits:
    """What a hostile function may use."""
    return AMPLE if name in NEEDS_AMPLE else LIMITS


def processes_of(server: JudgeServer) -> list[int]:
    """Every process that a zygote of this server is or forked, whatever it has done to leave."""
    marker = f'"server": {server._process.pid}'.encode()
    found = []
    for directory in Path("/proc").iterdir():
        try:
            if directory.name.isdigit() and marker in (directory / "cmdline").read_bytes():
                found.append(int(directory.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def until_settled(server: JudgeServer, most: int) -> int:
    """Number of processes once the last namespaces have ended, or after a minute."""
    for _ in range(600):
        if len(processes_of(server)) <= most:
            break
        time.sleep(0.1)
    return len(processes_of(server))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hostile_function(server: JudgeServer, name: str) -> None:
    """Its own verdict, and a right answer after it is `success`."""
    program, expected = FUNCTIONS[name]
    verdict = server.submit(function(program), limits_of(name)).result(timeout=300)
    assert verdict.error_type in expected.split("|"), verdict.message
    assert server.submit(function(RIGHT)).result(timeout=60).error_type == "success"


@pytest.mark.parametrize("name", PROGRAMS)
def test_hostile_program(server: JudgeServer, name: str) -> None:
    """Its own verdict."""
    program, expected = PROGRAMS[name]
    verdict = server.submit(script(program)).result(timeout=60)
    assert verdict.error_type in expected.split("|"), verdict.message


def test_200_at_once(tmp_path: Path) -> None:
    """Hostile answers of all kinds among right ones: each right one is `success`, and nothing is left."""
    before = {path: os.stat(path).st_mtime_ns for path in ("/tmp", "/dev/shm", "/etc", "/usr", str(Path.home()))}
    hostile = [(function(program), limits_of(name), expected) for name, (program, expected) in FUNCTIONS.items()]
    hostile += [(script(program), LIMITS, expected) for program, expected in PROGRAMS.values()]
    right = [(function(RIGHT), LIMITS, "success"), (script("print(2 * int(input()))"), LIMITS, "success")]
    mixed = list(itertools.islice(zip(itertools.cycle(hostile), itertools.cycle(right)), 100))
    cases = [case for pair in mixed for case in pair]
    with JudgeServer("bwrap", num_workers=4, limits=LIMITS) as server:
        futures = [server.submit(submission, limits) for submission, limits, _ in cases]
        verdicts = [future.result(timeout=600) for future in futures]
        assert until_settled(server, most=4 * LASTING_PER_WORKER) <= 4 * LASTING_PER_WORKER
    wrong = [
        (submission.program[:200], expected, verdict.error_type, verdict.message)
        for (submission, _, expected), verdict in zip(cases, verdicts)
        if verdict.error_type not in expected.split("|")
    ]
    assert len(verdicts) == 200 and wrong == []
    assert until_settled(server, most=0) == 0
    assert not list(Path("/tmp").glob("hostile*")) and not Path("/tmp/f1").exists()
    assert {path: os.stat(path).st_mtime_ns for path in ("/etc", "/usr")} == {p: before[p] for p in ("/etc", "/usr")}
