"""What draws completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

from verl_ext.grpo.rollout.completion import Completion, Draw, Sampling


class RolloutEngine(ABC):
    """Draws completions."""

    @abstractmethod
    def draw(self, draws: Sequence[Draw], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Draw every completion.

        Yields:
            Number of the draw and its completion without text, as soon as it is there.
        """

    @abstractmethod
    def close(self) -> None:
        """End what was started."""


class WeightKeeper(RolloutEngine):
    """An engine with weights of its own, which must be sent to it after every update."""

    dtype: torch.dtype
    """Of its weights."""
    forgets_in_sleep: bool
    """Whether sleeping gives memory back; else it has no effect."""

    @abstractmethod
    def load_bucket(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take over some whole tensors by the names that the model's export has."""

    @abstractmethod
    def end_load(self) -> None:
        """All tensors are there: nothing that was computed with the old ones may be used again.

        Raises:
            UserError: some that the engine needs were never sent.
        """

    @abstractmethod
    def wake(self) -> None:
        """Take the memory that drawing needs; to be called before the weights are sent."""

    @abstractmethod
    def sleep(self) -> None:
        """Give back the memory that only drawing needs, weights included."""
