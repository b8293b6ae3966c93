"""The verdict on an answer from what was seen of its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eval_pipeline.config import JudgeLimits
from eval_pipeline.judge.verdict import ErrorType, Verdict
from eval_pipeline.problems.problem import Case

MESSAGE_CHARS = 500
_BY_SEVERITY: tuple[ErrorType, ...] = ("syntax_error", "timeout", "runtime_error", "wrong_answer", "success")
_SHOWN_CHARS = 120


@dataclass(frozen=True)
class TestResult:
    """One test of an answer."""

    error_type: ErrorType
    message: str
    wall_s: float
    doubtful: bool = False
    """The machine may be the cause: the wall clock stopped the answer while it had processor time left, or the process
    of the test was killed. Another run decides."""


NO_PROGRAM = TestResult("syntax_error", "no program in the answer", 0.0)
"""Of an empty program, which would run without an error and must not count as code that ran."""


def verdict_of(results: Sequence[TestResult], num_tests: int) -> Verdict:
    """The verdict from the tests that were run, in order; those that were not run are not passed.

    Args:
        results: none only where the problem has no tests, which is the data's fault and not the answer's.
        num_tests: of the problem.
    """
    if not results:
        return Verdict("api_error", 0, num_tests, "the problem has no tests")
    worst = min((result.error_type for result in results), key=_BY_SEVERITY.index)
    number, first = next((n, result) for n, result in enumerate(results, 1) if result.error_type == worst)
    num_passed = sum(result.error_type == "success" for result in results)
    wall_s = sum(result.wall_s for result in results)
    message = "" if worst == "success" else _numbered(number, first)
    return Verdict(worst, num_passed, num_tests, message[:MESSAGE_CHARS], wall_s)


def _numbered(number: int, result: TestResult) -> str:
    return result.message if result.error_type == "syntax_error" else f"test {number}: {result.message}"


def function_result(report: dict[str, Any], outcome: dict[str, str], limits: JudgeLimits) -> TestResult:
    """Judge a test of a function.

    Args:
        report: what the supervisor saw of the answer (`inside/supervise.py`).
        outcome: what its test came to (`inside/tester.py`), never anything that the answer said of itself.
        limits: what the run might use.
    """
    if (stopped := _stopped(report, limits)) is not None:
        return stopped
    wall_s = report["wall_s"]
    match outcome["outcome"]:
        case "passed":
            return TestResult("success", "", wall_s)
        case "failed":
            return TestResult("wrong_answer", outcome["message"], wall_s)
        case "error":
            return TestResult("runtime_error", outcome["message"], wall_s)
        case "died" if wall_s >= min(limits.cpu_s, limits.test_cpu_s):
            return TestResult("timeout", outcome["message"], wall_s)
    message = outcome["message"] if report["reason"] == "ended" else _ending(report)
    return TestResult("runtime_error", message, wall_s, doubtful=outcome["outcome"] == "died")


def program_result(
    report: dict[str, Any],
    output: bytes,
    case: Case,
    match: Callable[[str, str], bool],
    limits: JudgeLimits,
) -> TestResult:
    """Judge a run of a program by what it printed.

    Args:
        report: what the supervisor saw of it.
        output: its standard output, cut off at the limit.
        case: what it should have printed.
        match: whether what it printed and what it should have printed are the same.
        limits: what the run might use.
    """
    if (stopped := _stopped(report, limits)) is not None:
        return stopped
    if report["exit"] != 0:
        return TestResult("runtime_error", _ending(report), report["wall_s"])
    actual = output.decode(errors="replace")
    if match(actual, case.expected):
        return TestResult("success", "", report["wall_s"])
    message = f"printed {_shown(actual)}, expected {_shown(case.expected)}"
    return TestResult("wrong_answer", message, report["wall_s"])


def _stopped(report: dict[str, Any], limits: JudgeLimits) -> TestResult | None:
    """The result of a run that did not compile or hit a limit; None for any other."""
    wall_s, reason, compiling = report["wall_s"], report["reason"], report["compiling"]
    if reason == "cpu":
        return TestResult("timeout", f"more than {limits.cpu_s:g} s of processor time", wall_s)
    if reason == "wall":
        return TestResult("timeout", f"more than {limits.wall_s:g} s", wall_s, doubtful=True)
    if reason in ("memory", "processes", "files"):
        return TestResult("runtime_error", f"more {reason} than allowed", wall_s)
    if "syntax_error" in compiling:
        return TestResult("syntax_error", compiling["syntax_error"], wall_s)
    if reason == "exited" and "compiled" not in compiling:
        return TestResult("syntax_error", "the compiler did not survive it", wall_s)
    return None


def _ending(report: dict[str, Any]) -> str:
    """How a process ended, for a person to read."""
    errors = report["errors"].strip().splitlines()
    status = report["exit"]
    ended = f"killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
    return f"{errors[-1].strip()} ({ended})" if errors else ended


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")
