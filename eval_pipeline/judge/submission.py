"""What a judge is given."""

from __future__ import annotations

from dataclasses import dataclass

from eval_pipeline.problems.problem import Tests


@dataclass(frozen=True)
class Submission:
    """One answer to judge."""

    program: str
    """The program found in the answer, empty where there is none; for a `ReferenceAnswer` the whole answer."""
    tests: Tests
    error: str | None = None
    """Why there is no answer; it is an `api_error` then and nothing runs."""
