"""Turns what was seen of a program into a verdict. Decided here, outside the program's process."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

from eval_pipeline.sandbox import Execution, Limits

ErrorType = Literal["success", "wrong_answer", "syntax_error", "runtime_error", "timeout", "api_error"]
ERROR_TYPES: tuple[ErrorType, ...] = get_args(ErrorType)


@dataclass(frozen=True)
class Verdict:
    """The judgement on one answer."""

    error_type: ErrorType
    num_passed: int
    num_tests: int
    message: str = ""
    """What went wrong first, for a person to read."""
    judge_s: float = 0.0
    """Wall-clock seconds that running the answer took."""
    starved: bool = False
    """Stopped by the wall clock while it had hardly run: the machine may have been slow, not the answer."""

    @property
    def pass_ratio(self) -> float:
        """Passed tests over all tests, 0 to 1."""
        return self.num_passed / self.num_tests


def decide(execution: Execution, num_tests: int, limits: Limits) -> Verdict:
    """Judge one execution.

    An answer succeeds only if the runner reported each test as passed, reported its own end, and left with status 0;
    so leaving early, in whatever way, is a `runtime_error`. One test that raised makes the whole answer a
    `runtime_error`, since `wrong_answer` stands for code that ran.

    Args:
        execution: what was seen from outside.
        num_tests: tests that the runner was given, at least 1.
        limits: the limits that it ran under.
    """
    error_type, message = _classify(execution, num_tests, limits)
    return Verdict(
        error_type=error_type,
        num_passed=min(_count(execution)["passed"], num_tests),
        num_tests=num_tests,
        message=message,
        judge_s=execution.wall_s,
        starved=execution.wall_limit_hit and execution.cpu_s < limits.wall_s / 2,
    )


def _classify(execution: Execution, num_tests: int, limits: Limits) -> tuple[ErrorType, str]:
    counts = _count(execution)
    if not counts["ready"]:
        return "api_error", f"The sandbox did not start: {execution.output.strip()[-500:]}"
    if _ran_out_of_time(execution, limits):
        return "timeout", f"Stopped after {execution.wall_s:.1f} s, {execution.cpu_s:.1f} s of them on the processor."
    if counts["syntax_error"]:
        return "syntax_error", _first_message(execution, "syntax_error")
    if counts["answer_error"] or counts["error"]:
        return "runtime_error", _first_message(execution, "answer_error", "error")
    if not _is_complete(execution, counts, num_tests):
        return "runtime_error", f"Ended with status {execution.exit_status} before all tests had run."
    if counts["failed"]:
        return "wrong_answer", _first_message(execution, "failed")
    return "success", ""


def _count(execution: Execution) -> Counter[str]:
    return Counter(str(event.get("event")) for event in execution.events)


def _ran_out_of_time(execution: Execution, limits: Limits) -> bool:
    if execution.wall_limit_hit or execution.exit_status == -signal.SIGXCPU:
        return True
    # the hard limit's SIGKILL looks like any other (the kernel's out-of-memory killer's, for one) but for the time used
    return execution.exit_status == -signal.SIGKILL and execution.cpu_s >= limits.cpu_s


def _is_complete(execution: Execution, counts: Counter[str], num_tests: int) -> bool:
    all_ran = counts["passed"] + counts["failed"] == num_tests
    return all_ran and counts["done"] == 1 and execution.exit_status == 0


def _first_message(execution: Execution, *kinds: str) -> str:
    return next(str(event.get("message", "")) for event in execution.events if event.get("event") in kinds)
