"""Judges all answers, several at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tqdm import tqdm

from eval_pipeline.sandbox import Limits, run_program
from eval_pipeline.verdict import Verdict, decide


@dataclass(frozen=True)
class Submission:
    """One program to judge."""

    code: str
    tests: tuple[str, ...]
    error: str | None = None
    """Why there is no answer to judge; None when there is one."""


def judge(submission: Submission, limits: Limits) -> Verdict:
    """Judge one program.

    Args:
        submission: the program; one without an answer is an `api_error` and does not run.
        limits: what it may use.

    Raises:
        OSError: this machine could not start another process.
    """
    num_tests = len(submission.tests)
    if submission.error is not None:
        return Verdict("api_error", num_passed=0, num_tests=num_tests, message=submission.error)
    return decide(run_program(submission.code, submission.tests, limits), num_tests, limits)


def judge_all(submissions: Sequence[Submission], limits: Limits, num_workers: int | None = None) -> list[Verdict]:
    """Judge all programs, in the order given. Call it from a process that does not hold vLLM.

    Args:
        submissions: what to judge.
        limits: what each may use.
        num_workers: programs run at a time; None takes one per processor.

    Raises:
        OSError: this machine could not start another process.
    """
    with ThreadPoolExecutor(num_workers or os.cpu_count()) as pool:
        verdicts = _with_bar(pool.map(lambda submission: judge(submission, limits), submissions), len(submissions))
    # a slow machine must not cost an answer its verdict: one that hardly got to run is run again, alone
    return [
        judge(submission, limits) if verdict.starved else verdict
        for submission, verdict in zip(submissions, verdicts, strict=True)
    ]


def _with_bar(verdicts: Iterable[Verdict], total: int) -> list[Verdict]:
    return list(tqdm(verdicts, total=total, desc="judging", unit="answer", dynamic_ncols=True))
