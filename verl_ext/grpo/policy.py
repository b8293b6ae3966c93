"""What is trained: it draws actions for prompts, and says how likely they were. Tokens are one policy's actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from verl_ext.errors import Stop


@dataclass(frozen=True)
class Prompt:
    """What a group of actions is drawn for.

    Attributes:
        sample_id: names it in every run with this data; seeds derive from it.
        row: its number in the data set.
        content: what the policy and the environment know of it.
    """

    sample_id: str
    row: int
    content: Mapping[str, Any]


@dataclass(frozen=True)
class Sample:
    """One action for a prompt.

    Attributes:
        prompt: what it was drawn for.
        number: which of the prompt's samples it is, from 0.
        action: the policy's own kind of thing; what is rewarded.
    """

    prompt: Prompt
    number: int
    action: Any


@dataclass(frozen=True)
class LogProbs:
    """What the model says of the actions of a micro-batch, each (samples, decisions).

    Attributes:
        values: log-probability of each decision.
        entropy: of the distribution that it is drawn from, in nats.
    """

    values: torch.Tensor
    entropy: torch.Tensor


MicroBatch = dict[str, torch.Tensor]
"""Tensors of some samples. Of (samples, decisions) are `mask`, 1 at each decision, and `rollout_log_probs`, each
decision's log-probability as whoever drew it saw it; the others are the policy's own."""


class Policy(ABC):
    """Draws actions and evaluates them; collective where its model is spread over ranks."""

    figures: Sequence[str]
    """Names of what `measure` tells of a sample."""
    count_name = "total_valid_token_count"
    """Of the metric that counts decisions."""
    rate_name = "valid_tokens_per_s"
    """Of the metric that tells how many there are in a second."""
    engine_dtype: torch.dtype | None = None
    """Of the weights of an engine that has its own; None where the trained model itself draws."""

    @contextmanager
    def drawing(self, version: int) -> Iterator[dict[str, float]]:
        """Sample actions within the block, and release what only sampling needs after it or a `Stop`; collective.

        Any other error may be that of a dead engine or of one rank alone, so it leaves the block as it is.

        Args:
            version: see `begin_drawing`.

        Yields:
            What `begin_drawing` returns.
        """
        metrics = self.begin_drawing(version)
        try:
            yield metrics
        except Stop:  # the run saves now, which needs the memory
            self.end_drawing()
            raise
        self.end_drawing()

    @abstractmethod
    def begin_drawing(self, version: int) -> dict[str, float]:
        """Have actions drawn by the model as it is now; collective.

        Args:
            version: the number of updates that the model has had, by which changed weights are told.

        Returns:
            Metrics by their full names.
        """

    @abstractmethod
    def draw(self, prompts: Sequence[Prompt], step: int, *, num_samples: int, greedy: bool = False) -> Iterator[Sample]:
        """Draw actions for each prompt of this rank; inside `drawing`.

        Args:
            prompts: this rank's.
            step: seeds derive from it, the run's seed and each prompt's `sample_id`.
            num_samples: actions for each prompt.
            greedy: take the likeliest action instead of drawing one.

        Yields:
            Each sample as soon as it is there, in any order.
        """

    def draw_whole(self, samples: Sequence[Sample], step: int) -> list[Sample]:
        """Samples like these whose log-probabilities are of the whole distribution, as `log_probs` tells them.

        Inside `drawing`; the arguments are those of `draw` and what it drew.
        """
        return list(samples)

    @abstractmethod
    def end_drawing(self) -> None:
        """Give back what only drawing needs."""

    @abstractmethod
    def collate(self, samples: Sequence[Sample]) -> MicroBatch:
        """Samples as tensors on the CPU."""

    @abstractmethod
    def log_probs(self, micro_batch: MicroBatch) -> LogProbs:
        """Evaluate the drawn actions by the model as it is, with gradient where that is enabled; collective."""

    @abstractmethod
    def reference_log_probs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """(samples, decisions): the same by the frozen model that training began from; collective."""

    @abstractmethod
    def order(self, samples: Sequence[Sample]) -> list[int]:
        """Numbers of the samples in the order in which they are cut into micro-batches, the most costly first."""

    @abstractmethod
    def num_decisions(self, sample: Sample) -> int:
        """How many of a sample's decisions count in the loss."""

    @abstractmethod
    def measure(self, sample: Sample) -> dict[str, float]:
        """Figures of a sample, of which `train/NAME_mean` and `train/NAME_max` are logged."""

    @abstractmethod
    def row(self, sample: Sample) -> dict[str, str]:
        """A sample for a person to read: column to text."""

    @abstractmethod
    def close(self) -> None:
        """End everything that was started."""
