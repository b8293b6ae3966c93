"""Submissions and verdicts as the client and the server send them to each other."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from eval_pipeline.config import JudgeLimits
from eval_pipeline.judge.submission import Submission
from eval_pipeline.judge.verdict import Verdict
from eval_pipeline.problems.problem import Case, FunctionTests, ProgramTests, ReferenceAnswer, Tests


def dump_submission(submission: Submission, limits: JudgeLimits) -> dict[str, Any]:
    """A submission and what it may use, as JSON can say it."""
    return {
        "program": submission.program,
        "kind": type(submission.tests).__name__,
        "tests": asdict(submission.tests),
        "limits": asdict(limits),
    }


def load_submission(message: dict[str, Any]) -> tuple[Submission, JudgeLimits]:
    """What `dump_submission` was given."""
    return Submission(message["program"], _tests(message["kind"], message["tests"])), JudgeLimits(**message["limits"])


def dump_verdict(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON can say it."""
    return asdict(verdict)


def load_verdict(message: dict[str, Any]) -> Verdict:
    """What `dump_verdict` was given."""
    return Verdict(**message)


def num_tests_of(tests: Tests) -> int:
    """How many tests an answer can pass."""
    match tests:
        case FunctionTests():
            return len(tests.tests)
        case ProgramTests():
            return len(tests.cases)
    return 1


def _tests(kind: str, fields: dict[str, Any]) -> Tests:
    match kind:
        case "FunctionTests":
            return FunctionTests(**{**fields, "tests": tuple(fields["tests"])})
        case "ProgramTests":
            return ProgramTests(tuple(Case(**case) for case in fields["cases"]), fields["tolerance"])
    return ReferenceAnswer(**fields)
