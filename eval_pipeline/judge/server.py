"""The judge server, which owns all sandboxes: it reads requests from its input and writes each result when it is ready.

`client.py` starts it as `python -m eval_pipeline.judge.server OPTIONS`, where OPTIONS is a JSON object. It ends when
its input ends, and every sandbox ends with it.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import select
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from eval_pipeline.judge.comparator import Comparator
from eval_pipeline.judge.inside import protocol
from eval_pipeline.judge.isolation import IsolationLevel, JudgePackage, candidate_levels
from eval_pipeline.judge.runs import AnswerRuns, SandboxPool
from eval_pipeline.judge.sandbox import STARTS, ReadWriteLock, SandboxError
from eval_pipeline.judge.types import (
    FunctionTests,
    ProgramCase,
    ProgramRun,
    ProgramTests,
    ReferenceAnswer,
    ResourceLimits,
    RunReport,
    ScoredAnswer,
    Submission,
    Verdict,
    request_from_json,
    result_to_json,
)
from eval_pipeline.judge.verdicts import (
    MESSAGE_CHARS,
    NO_PROGRAM,
    TestResult,
    combine_results,
    judge_function_run,
    judge_program_run,
    may_be_starved,
)
from verl_ext.cli import child_process_args
from verl_ext.commands import program

T = TypeVar("T")

_PARENT_CHECK_S = 1.0
_MAX_OPEN_FILES = 1 << 16
"""Not more, because processes in sandboxes close this many when they start."""
_ATTEMPTS = 2
_PROBE = Submission("def f(x):\n    return x + 1\n", FunctionTests("f", ("assert f(1) == 2",)))


def main() -> None:
    """Find the isolation level, then serve until the input ends."""
    [words] = child_process_args(
        "eval_pipeline.judge.server",
        "Owns the sandboxes that programs are judged in.",
        f"{program('judge')} --dataset human-eval --answers answers.jsonl --output verdicts.jsonl",
        "options",
    )
    options = json.loads(words)
    # warnings about tests, which this process compiles, are of no use here
    warnings.simplefilter("ignore", SyntaxWarning)
    _raise_open_files_limit()
    output = Output(os.dup(1))
    os.dup2(2, 1)
    packages = tuple(JudgePackage(**package) for package in options["packages"])
    level, reasons = _find_level(options["isolation"], packages)
    if level is None:
        output.write({"refused": reasons})
        return
    output.write({"isolation": level.name, "reasons": reasons})
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    gate = ReadWriteLock()
    for _ in range(options["num_workers"]):
        threading.Thread(target=_work, args=(jobs, level, gate, output), daemon=True).start()
    with suppress(protocol.FrameError):  # the client ended in the middle of a message
        _read_jobs(jobs, os.getppid())
    _end(0)


class JudgeWorker:
    """Serves one request at a time in two sandboxes, which start on first use.

    Args:
        level: isolation level of the sandboxes.
        gate: shared by all workers of the server.
    """

    def __init__(self, level: IsolationLevel, gate: ReadWriteLock) -> None:
        self._gate = gate
        self._sandboxes = SandboxPool(level)
        self._comparator = Comparator()

    def judge(self, submission: Submission, limits: ResourceLimits) -> Verdict:
        """The verdict on one answer; `api_error` if the sandbox fails twice."""
        try:
            return self._retry(partial(self._judge, submission, limits))
        except SandboxError as error:
            return Verdict("api_error", 0, submission.num_tests, str(error)[:MESSAGE_CHARS])

    def run(self, request: ProgramRun, limits: ResourceLimits) -> RunReport:
        """Run one program.

        Raises:
            SandboxError: the sandbox fails twice.
        """
        return self._retry(partial(self._run, request, limits))

    def close(self) -> None:
        """End the sandboxes; the next request starts new ones."""
        self._sandboxes.close()
        self._comparator.close()

    def _retry(self, serve: Callable[[], T]) -> T:
        failure = ""
        for _ in range(_ATTEMPTS):
            try:
                return serve()
            except (SandboxError, OSError) as error:
                self.close()
                failure = str(error)
        raise SandboxError(failure)

    def _run(self, request: ProgramRun, limits: ResourceLimits) -> RunReport:
        with self._sandboxes.runs_of(request.program, "", limits) as runs:
            return self._not_starved(
                lambda: runs.run_program(request.stdin),
                lambda report: report.end == "wall" and may_be_starved(report.idle_s, limits),
            )

    def _judge(self, submission: Submission, limits: ResourceLimits) -> Verdict:
        tests = submission.tests
        if isinstance(tests, ReferenceAnswer):
            with self._gate.shared():
                return self._comparator.judge(submission.program, tests.answer, limits)
        if isinstance(tests, ScoredAnswer):
            with self._gate.shared():
                return self._comparator.score(submission.program, tests, limits)
        if not submission.program:
            return combine_results([NO_PROGRAM], submission.num_tests)
        preamble = tests.preamble if isinstance(tests, FunctionTests) else ""
        results = []
        with self._sandboxes.runs_of(submission.program, preamble, limits) as runs:
            for test in self._tests(tests, runs, limits):
                results.append(self._not_starved(test, lambda result: result.is_doubtful))
                if results[-1].error_type in ("timeout", "syntax_error"):
                    break  # the remaining tests are not passed
        return combine_results(results, submission.num_tests)

    def _tests(
        self, tests: FunctionTests | ProgramTests, runs: AnswerRuns, limits: ResourceLimits
    ) -> list[Callable[[], TestResult]]:
        if isinstance(tests, FunctionTests):
            return [partial(_run_test, runs, tests, test, limits) for test in tests.tests]
        match = partial(self._comparator.outputs_match, tolerance=tests.tolerance, any_case=tests.any_case)
        return [partial(_run_case, runs, case, match, limits) for case in tests.cases]

    def _not_starved(self, run: Callable[[], T], is_doubtful: Callable[[T], bool]) -> T:
        """The result of a run. If a busy machine may have affected it, repeat the run alone."""
        with self._gate.shared():
            result = run()
        if not is_doubtful(result):
            return result
        with self._gate.exclusive():
            return run()


def _run_test(runs: AnswerRuns, tests: FunctionTests, test: str, limits: ResourceLimits) -> TestResult:
    return judge_function_run(*runs.run_test(tests, test), limits)


def _run_case(
    runs: AnswerRuns, case: ProgramCase, match: Callable[[str, str], bool], limits: ResourceLimits
) -> TestResult:
    return judge_program_run(runs.run_program(case.stdin), case, match, limits)


def _end(status: int) -> None:
    """End this process and its sandboxes, but not while a sandbox is starting."""
    with STARTS.exclusive():
        os._exit(status)


def _raise_open_files_limit() -> None:
    """Each worker holds several files, and a machine may have hundreds of processors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))


class Output:
    """A file descriptor that all workers write their results to."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def write(self, message: dict[str, Any], blob: bytes = b"") -> None:
        """Write one whole message. If the reader is gone, the process ends."""
        with self._lock:
            try:
                protocol.write(self._fd, message, blob)
            except BrokenPipeError:
                _end(0)


def _find_level(isolation: str, packages: tuple[JudgePackage, ...]) -> tuple[IsolationLevel | None, list[str]]:
    """The first level that judges a correct answer as correct, and why stronger ones do not work."""
    reasons: list[str] = []
    for level in candidate_levels(isolation, packages):
        worker = JudgeWorker(level, ReadWriteLock())
        verdict = worker.judge(_PROBE, ResourceLimits())
        worker.close()
        if verdict.error_type == "success":
            return level, reasons
        reasons.append(f"{level.name}: {' '.join(verdict.message.split())}")
    return None, reasons


def _work(jobs: queue.SimpleQueue[dict[str, Any]], level: IsolationLevel, gate: ReadWriteLock, output: Output) -> None:
    """One thread of the server."""
    worker = JudgeWorker(level, gate)
    while True:
        message = jobs.get()
        try:
            request, limits = request_from_json(message)
            answer, blob = result_to_json(
                worker.judge(request, limits) if isinstance(request, Submission) else worker.run(request, limits)
            )
        except BaseException as error:
            # an error of the judge costs this request and the worker's sandboxes, not the server
            answer, blob = {"failed": _failure(error)}, b""
            try:
                worker.close()
            except BaseException:  # the rest ends with this process
                traceback.print_exc()
            worker = JudgeWorker(level, gate)
        output.write({"id": message["id"], **answer}, blob)


def _failure(error: BaseException) -> str:
    if isinstance(error, SandboxError):
        return str(error)[:MESSAGE_CHARS]
    traceback.print_exc()
    return f"the judge failed: {error!r}"[:MESSAGE_CHARS]


def _read_jobs(jobs: queue.SimpleQueue[dict[str, Any]], parent: int) -> None:
    """Queue requests until the input ends or the parent dies.

    If another child of the parent holds a copy of the pipe, the input does not end with the parent.
    """
    while os.getppid() == parent:
        if not select.select([0], [], [], _PARENT_CHECK_S)[0]:
            continue
        received = protocol.read(0)
        if received is None:
            return
        jobs.put(received[0])


if __name__ == "__main__":
    main()
