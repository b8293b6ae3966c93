"""Why a sample lacks a part of its reward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RewardFailure:
    """One failed call of a reward function.

    Attributes:
        reason: one line.
        traceback: of the user's code, empty where nothing was raised there.
        timed_out: whether the call took longer than `reward.time_limit_s`.
    """

    reason: str
    traceback: str = ""
    timed_out: bool = False


class RewardError(Exception):
    """A call of a reward function has failed."""

    def __init__(self, failure: RewardFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure
