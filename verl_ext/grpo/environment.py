"""What actions are good for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from verl_ext.grpo.failure import RewardFailure
from verl_ext.grpo.policy import Sample


@dataclass(frozen=True)
class Reward:
    """Of one sample.

    Attributes:
        parts: weighted contribution of each reward function by its name.
        failures: what kept a function from giving its part, by its name. A sample with one has no reward.
        finished: moment of `time.perf_counter` when the last part was there; 0 where that is not told.
        figures: what else was measured on the way, by the names in the environment's `figures`.
    """

    parts: dict[str, float]
    failures: dict[str, RewardFailure] = field(default_factory=dict)
    finished: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float | None:
        """The sum of the parts; None where one is missing, for a failed function says nothing about the sample."""
        return None if self.failures else sum(self.parts.values())


class Environment(ABC):
    """Rewards samples, each as soon as it is handed in."""

    names: Sequence[str]
    """Of the parts of every reward."""
    figures: Sequence[str] = ()
    """Of what else is measured for every sample."""

    @abstractmethod
    def submit(self, sample: Sample) -> None:
        """Begin to reward one sample; returns at once."""

    @abstractmethod
    def collect(self) -> list[Reward]:
        """The rewards of all that was submitted since the last call, in that order; waits for them."""

    @abstractmethod
    def close(self) -> None:
        """End everything that was started."""
