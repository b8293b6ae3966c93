"""The judgement on one answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ErrorType = Literal["success", "wrong_answer", "syntax_error", "runtime_error", "timeout", "api_error"]
ERROR_TYPES: tuple[ErrorType, ...] = get_args(ErrorType)


@dataclass(frozen=True)
class Verdict:
    """The judgement on one answer."""

    error_type: ErrorType
    num_passed: int
    num_tests: int
    message: str = ""
    """What went wrong in the first test that ended as `error_type` says, for a person to read."""
    judge_time: float = 0.0
    """Wall-clock seconds that running the answer took."""

    @property
    def pass_ratio(self) -> float:
        """Passed tests over all tests, 0 to 1; 0 where there are no tests."""
        return self.num_passed / self.num_tests if self.num_tests else 0.0
