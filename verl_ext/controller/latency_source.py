"""Where a latency comes from: as it was measured, or as the latency model says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from verl_ext.controller.execution import Executor, Outcome
from verl_ext.controller.latency_model import LatencyModel
from verl_ext.data.questions import ImageQuestion


class LatencySource(ABC):
    """Milliseconds of what an executor did."""

    @abstractmethod
    def of_run(self, outcome: Outcome) -> float:
        """Of running a configuration, the encoding of the image included."""

    @abstractmethod
    def of_looking(self, executor: Executor, question: ImageQuestion) -> float:
        """Of encoding an image at the lowest tier, by which a configuration is chosen."""


class MeasuredLatency(LatencySource):
    """As it was measured."""

    def of_run(self, outcome: Outcome) -> float:
        """See `LatencySource`."""
        return outcome.latency.total_ms

    def of_looking(self, executor: Executor, question: ImageQuestion) -> float:
        """See `LatencySource`."""
        return executor.seen(question, 0).vision_ms


@dataclass(frozen=True)
class ModelledLatency(LatencySource):
    """As a latency model says: the same in every run.

    Attributes:
        model: fitted on this machine, for this vision-language model.
    """

    model: LatencyModel

    def of_run(self, outcome: Outcome) -> float:
        """See `LatencySource`."""
        return self.model.predict(outcome.workload).total_ms

    def of_looking(self, executor: Executor, question: ImageQuestion) -> float:
        """See `LatencySource`."""
        return self.model.vision_ms(executor.adapter.num_patches(executor.seen(question, 0).inputs))
