"""Judge servers at each isolation level, their processes as seen from outside, and checks that campaigns repeat."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from eval_pipeline.judge import (
    FunctionTests,
    JudgeClient,
    JudgeConfig,
    ProgramCase,
    ProgramTests,
    ResourceLimits,
    Submission,
    Verdict,
)
from tests.helpers import ROOT
from tests.helpers.hostile_answers import (
    CANARY,
    DAEMONS,
    ECHO,
    FUNCTIONS,
    KILLS_ITS_SUPERVISOR,
    LEAVES_CANARIES,
    PROGRAMS,
    RIGHT,
    TEST,
)
from tests.helpers.processes import family_of, wait_gone, wait_until, words_of
from verl_ext.errors import UserError

LEVELS = ("bwrap", "sandlock", "rlimits")
RESULT_S = 300.0
"""Longer than any verdict takes on a busy machine."""
LASTING_PER_WORKER = {"bwrap": 9, "sandlock": 2, "rlimits": 2}
"""Processes of a worker between two answers. With bwrap these are two of bubblewrap for each of two sandboxes, the
zygote of testers, the zygote of supervisors, the first process of its namespace, a supervisor and a tester."""

HOSTILE_LIMITS = ResourceLimits(cpu_s=10, wall_s=60, memory_mb=256, file_mb=4, num_processes=32)
_ENDED_BY_TIME = replace(HOSTILE_LIMITS, cpu_s=0.5, wall_s=3)
_OF_HOSTILE = {
    **dict.fromkeys(
        ("scan of memory", "deep recursion", "deep result", "huge result"),
        ResourceLimits(cpu_s=20, wall_s=120, memory_mb=512),
    ),
    # only the wall clock ends these
    **dict.fromkeys(("stop itself", "endless requests"), replace(_ENDED_BY_TIME, wall_s=1)),
}


# --- submissions and servers


def function(program: str, *tests: str, entry_point: str = "f", preamble: str = "") -> Submission:
    """An answer that is called; the default test is `assert f(1) == 2`."""
    return Submission(program, FunctionTests(entry_point, tests or ("assert f(1) == 2",), preamble))


def script(program: str, *cases: tuple[str, str], tolerance: float | None = None) -> Submission:
    """An answer that is run; the default case expects `2` for `1`."""
    return Submission(
        program, ProgramTests(tuple(ProgramCase(*case) for case in cases or (("1\n", "2\n"),)), tolerance)
    )


SLEEPER = function("import time\ndef f(x): time.sleep(1000)")
LONG = ResourceLimits(cpu_s=100, wall_s=1000)


def judge_config(
    isolation: Any = "auto",
    num_workers: int | None = None,
    limits: ResourceLimits | None = None,
    packages: Sequence[str] = (),
) -> JudgeConfig:
    """The configuration of a judge whose answers may import only the standard library and `packages`."""
    limits = limits or ResourceLimits()
    return JudgeConfig(isolation=isolation, num_workers=num_workers, limits=limits, packages=list(packages))


@contextlib.contextmanager
def serving(
    isolation: str, num_workers: int, limits: ResourceLimits, packages: tuple[str, ...] = ()
) -> Iterator[JudgeClient]:
    """A judge server; the test is skipped where the isolation level does not work."""
    server = JudgeClient(judge_config(isolation, num_workers, limits, packages))
    try:
        server.__enter__()
    except UserError as error:
        pytest.skip(f"{isolation} does not work on this machine: {error}")
    try:
        yield server
    finally:
        server.__exit__(None, None, None)


def submit_all(
    server: JudgeClient, submissions: Mapping[str, tuple[Submission, ResourceLimits]]
) -> Callable[[str], Verdict]:
    """Submit everything at once; returns a function that waits for the verdict on one submission by its name."""
    futures = {name: server.submit(*arguments) for name, arguments in submissions.items()}
    return lambda name: futures[name].result(timeout=RESULT_S)


def judged(server: JudgeClient, submission: Submission, limits: ResourceLimits | None = None) -> tuple[str, str]:
    """Error type and message of the verdict."""
    verdict = server.submit(submission, limits).result(timeout=RESULT_S)
    return verdict.error_type, verdict.message


# --- processes


def processes_of(server: JudgeClient | int) -> list[int]:
    """The zygotes of a server, or of the server process with this number, and every process that they forked.

    A process that has detached itself still has its zygote's command line.
    """
    marker = f'"server": {server if isinstance(server, int) else server._process.pid}'.encode()
    found = []
    for directory in Path("/proc").iterdir():
        try:
            if directory.name.isdigit() and marker in (directory / "cmdline").read_bytes():
                found.append(int(directory.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def until_settled(server: JudgeClient | int, max_processes: int) -> int:
    """Wait until a server has at most `max_processes` and return their number; namespaces take time to end."""
    wait_until(lambda: len(processes_of(server)) <= max_processes)
    return len(processes_of(server))


@contextlib.contextmanager
def killing_judges(process: subprocess.Popen[Any], seed: int) -> Iterator[list[int]]:
    """Kill each judge server that a process or its children have started, at a random moment after its first verdict.

    Args:
        process: process of the command.
        seed: decides the moments.

    Yields:
        The numbers of those that were killed so far.
    """
    dice, is_over, killed = random.Random(seed), threading.Event(), []
    first_writes: dict[int, int] = {}
    moments: dict[int, float] = {}

    def look_at(server: psutil.Process) -> None:
        num_workers, num_writes = server.num_threads() - 1, server.io_counters().write_count
        if num_workers == 0:
            return  # it is still starting
        # it writes each program to a file before it runs it, and then the verdict
        if num_writes > first_writes.setdefault(server.pid, num_writes) + num_workers:
            moment = moments.setdefault(server.pid, time.monotonic() + dice.uniform(0, 0.5))
            if time.monotonic() >= moment:
                server.kill()
                killed.append(server.pid)

    def kill() -> None:
        while not is_over.wait(0.01):
            for child in family_of(process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.pid not in killed and "eval_pipeline.judge.server" in words_of(child):
                        look_at(child)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        is_over.set()
        thread.join()


def start_sleeper(server: JudgeClient) -> Future[Verdict]:
    """Submit an answer that sleeps to a server with one worker, and wait until the answer has been started."""
    future = server.submit(SLEEPER, LONG)
    # a worker starts the sandbox of the tests after the answer
    at_least = 7 if server.isolation == "bwrap" else 5
    wait_until(lambda: len(processes_of(server)) >= at_least)
    return future


_CLIENT = """
import signal, sys
from tests.helpers.judge import LONG, SLEEPER, JudgeClient, judge_config
server = JudgeClient(judge_config(sys.argv[1], num_workers=1)).__enter__()
server.submit(SLEEPER, LONG)
print(server._process.pid, flush=True)
signal.pause()
"""


def check_killed_client(isolation: str, num_processes: int) -> None:
    """Kill a client once its server has so many processes in sandboxes; the server and all of them must end."""
    with subprocess.Popen(
        [sys.executable, "-c", _CLIENT, isolation], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        try:
            server = psutil.Process(int(client.stdout.readline()))
            wait_until(lambda: len(processes_of(server.pid)) >= num_processes)
        finally:
            client.kill()
    wait_gone([server])
    assert until_settled(server.pid, max_processes=0) == 0


# --- hostile answers


def hostile(name: str) -> tuple[Submission, ResourceLimits, list[str]]:
    """A hostile function or program, its limits, and the error types that its verdict may have."""
    if name in FUNCTIONS:
        program, expected = FUNCTIONS[name]
        submission = function(program, TEST)
    else:
        program, expected = PROGRAMS[name]
        submission = script(program, ("3\n", "6\n"))
    error_types = expected.split("|")
    limits = _OF_HOSTILE.get(name, _ENDED_BY_TIME if "timeout" in error_types else HOSTILE_LIMITS)
    return submission, limits, error_types


def check_hostile(server: JudgeClient, name: str) -> None:
    """A hostile answer gets its verdict, and a right answer after it is `success`."""
    submission, limits, expected = hostile(name)
    error_type, message = judged(server, submission, limits)
    assert error_type in expected, message
    assert judged(server, function(RIGHT, TEST))[0] == "success"


def check_hostile_at_once(names: list[str], num_pairs: int) -> None:
    """Judge hostile answers among right ones with namespaces: every verdict is correct, and nothing is left."""
    kept = {path: Path(path).stat().st_mtime_ns for path in ("/etc", "/usr")}
    right = [function(RIGHT, TEST), script("print(2 * int(input()))", ("3\n", "6\n"))]
    cases = []
    for name, honest in itertools.islice(zip(itertools.cycle(names), itertools.cycle(right)), num_pairs):
        cases += [(name, *hostile(name)), ("right", honest, HOSTILE_LIMITS, ["success"])]
    max_processes = 4 * LASTING_PER_WORKER["bwrap"]
    with serving("bwrap", 4, HOSTILE_LIMITS) as server:
        futures = [server.submit(submission, limits) for _, submission, limits, _ in cases]
        verdicts = [future.result(timeout=3 * RESULT_S) for future in futures]
        assert until_settled(server, max_processes) <= max_processes
    wrong = [
        (name, expected, verdict.error_type, verdict.message)
        for (name, _, _, expected), verdict in zip(cases, verdicts)
        if verdict.error_type not in expected
    ]
    assert len(verdicts) == 2 * num_pairs and wrong == []
    assert until_settled(server, max_processes=0) == 0
    assert not list(Path("/tmp").glob("hostile*")) and not Path("/tmp/f1").exists()
    assert {path: Path(path).stat().st_mtime_ns for path in kept} == kept


def wait_until_nothing_is_left(server: JudgeClient) -> None:
    """Without namespaces: wait until only zygotes are left, and no temporary directory; verdicts do not wait for it."""
    max_processes = server._num_workers * LASTING_PER_WORKER[server.isolation]
    wait_until(lambda: len(processes_of(server)) <= max_processes and not _directories_of(server))


def _directories_of(server: JudgeClient) -> list[Path]:
    zygotes = {str(pid) for pid in processes_of(server)}
    return [path for path in Path("/tmp").glob("judge_*_*") if path.name.split("_")[1] in zygotes]


def check_daemons(server: JudgeClient, count: int) -> None:
    """Check that correct answers that leave processes are accepted and that no process outlives its test."""
    programs = list(itertools.islice(itertools.cycle(DAEMONS.values()), count))
    futures = [server.submit(function(program, TEST), ResourceLimits(cpu_s=5, wall_s=60)) for program in programs]
    verdicts = [future.result(timeout=2 * RESULT_S) for future in futures]
    assert {(verdict.error_type, verdict.message) for verdict in verdicts} == {("success", "")}
    wait_until_nothing_is_left(server)


def check_killed_supervisor(server: JudgeClient) -> None:
    """Check that the sandbox is replaced and that all processes of the answer end with it."""
    before = _abandoned()
    assert judged(server, function(KILLS_ITS_SUPERVISOR, TEST))[0] in ("api_error", "runtime_error", "timeout")
    assert judged(server, function(RIGHT, TEST))[0] == "success"
    wait_until_nothing_is_left(server)
    assert _abandoned() <= before


def _abandoned() -> set[Path]:
    """Temporary directories of answers whose zygote is gone."""
    return {path for path in Path("/tmp").glob("judge_*_*") if not Path("/proc", path.name.split("_")[1]).exists()}


# --- processes that serve many answers


def lasting(server: JudgeClient, role: str = "answer") -> set[int]:
    """The processes in the sandbox of answers, or of tests, that stay from one answer to the next, with namespaces."""
    assert judged(server, function(RIGHT, TEST)) == ("success", "")
    max_processes = LASTING_PER_WORKER["bwrap"]
    assert until_settled(server, max_processes) == max_processes
    mark = f'"role": "{role}"'.encode()
    return {pid for pid in processes_of(server) if mark in Path(f"/proc/{pid}/cmdline").read_bytes()}


def youngest(pids: set[int]) -> set[int]:
    """The processes that are not parents of any other."""
    return pids - {psutil.Process(pid).ppid() for pid in pids}


def check_memory_of_the_next(server: JudgeClient, scan: str) -> None:
    """Check that an answer's memory contains no program, input, output or process name of earlier answers."""
    before = lasting(server)
    for program in LEAVES_CANARIES.values():
        judged(server, function(program, TEST))
    assert judged(server, script(ECHO, (CANARY, CANARY))) == ("success", "")
    assert "KENNZ" in scan and judged(server, function(scan, TEST)) == ("success", "")
    assert lasting(server) == before, "the supervisor was not the same"


# --- HumanEval

HUMANEVAL_LIMITS = ResourceLimits(cpu_s=5, wall_s=120)
_OF_TIMEOUTS = ResourceLimits(cpu_s=0.5, wall_s=120)
_WRONG_VALUE = '''
def _altered(value):
    """Another value of the same type; every element of a container is another one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, (list, tuple)):
        return type(value)([*map(_altered, value), *value[:1]]) if value else type(value)([1])
    if isinstance(value, dict):
        return {**value, "x": "x"}
    return 1

def _altering(function):
    number = 0
    def altered(*arguments):
        nonlocal number
        number += 1
        value = function(*arguments)
        # tests that compare two results of the function with each other must see a difference too
        for _ in range(number):
            value = _altered(value)
        return value
    return altered

{name} = _altering({name})
'''


def _canonical(problem: Mapping[str, str]) -> str:
    return problem["prompt"] + problem["canonical_solution"] + "\n"


def _wrapped(problem: Mapping[str, str], body: str) -> str:
    """The canonical solution with a statement that is executed in every call."""
    name = problem["entry_point"]
    return f"{_canonical(problem)}\ndef _broken(*arguments):\n    {body}\n\n{name} = _broken\n"


BROKEN: dict[str, Callable[[Mapping[str, str]], str]] = {
    "success": _canonical,
    "syntax_error": lambda problem: _canonical(problem) + "\ndef broken(:\n",
    "runtime_error": lambda problem: _wrapped(problem, "raise ValueError('broken')"),
    "timeout": lambda problem: _wrapped(problem, "while True: pass"),
    "wrong_answer": lambda problem: _canonical(problem) + _WRONG_VALUE.replace("{name}", problem["entry_point"]),
}
"""Error type to a program for a problem of HumanEval that deserves it."""


def wrong_verdicts(
    server: JudgeClient, problems: list[dict[str, str]], error_types: list[str]
) -> list[tuple[str, str, str, str]]:
    """Judge a program of each error type for each problem: task, expected and actual error type, message if wrong."""
    cases = [(problem, error_type) for error_type in error_types for problem in problems]
    futures = []
    for problem, error_type in cases:
        submission = Submission(BROKEN[error_type](problem), _tests_of(problem))
        futures.append(server.submit(submission, _OF_TIMEOUTS if error_type == "timeout" else HUMANEVAL_LIMITS))
    verdicts = [future.result(timeout=4 * RESULT_S) for future in futures]
    assert len(verdicts) == len(problems) * len(error_types)
    return [
        (problem["task_id"], error_type, verdict.error_type, verdict.message)
        for (problem, error_type), verdict in zip(cases, verdicts)
        if verdict.error_type != error_type
    ]


def _tests_of(problem: Mapping[str, str]) -> FunctionTests:
    name = problem["entry_point"]
    preamble = problem["prompt"][: problem["prompt"].index(f"def {name}")]
    return FunctionTests(name, (f"{problem['test']}\ncheck({name})\n",), preamble)
