"""Where a latency comes from: as it was measured, or as the latency model says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.execution import Outcome, Seen
from verl_ext.controller.inference import Decision
from verl_ext.controller.latency_model import LatencyModel
from verl_ext.controller.loading import is_of_model
from verl_ext.errors import UserError


class LatencySource(ABC):
    """Milliseconds of what was run."""

    is_measured: bool
    """Whether they are other ones when the same is run again."""

    @property
    @abstractmethod
    def deciding_ms(self) -> float:
        """Of what the controller itself takes, beside looking, where nobody measures it for each question."""

    @abstractmethod
    def of_run(self, outcome: Outcome) -> float:
        """Of running a configuration, the encoding of the image included."""

    @abstractmethod
    def of_looking(self, low: Seen, adapter: VLMAdapter) -> float:
        """Of encoding an image at the lowest tier, by which a configuration is chosen."""

    @abstractmethod
    def of_deciding(self, decision: Decision) -> float:
        """Of what the controller itself takes, beside that encoding."""


@dataclass(frozen=True)
class MeasuredLatency(LatencySource):
    """As it was measured.

    Attributes:
        deciding_ms: see `LatencySource`.
    """

    deciding_ms: float = 0.0
    is_measured = True

    def of_run(self, outcome: Outcome) -> float:
        """See `LatencySource`."""
        return outcome.latency.total_ms

    def of_looking(self, low: Seen, adapter: VLMAdapter) -> float:
        """See `LatencySource`."""
        return low.vision_ms

    def of_deciding(self, decision: Decision) -> float:
        """See `LatencySource`."""
        return decision.own_ms


@dataclass(frozen=True)
class ModelledLatency(LatencySource):
    """As a latency model says: the same in every run.

    Attributes:
        model: fitted on this machine, for this vision-language model.
        percentile: of single runs that take no longer than what is told; 50 tells what the model was fitted to.
    """

    model: LatencyModel
    percentile: int = 50
    is_measured = False

    @classmethod
    def load(cls, path: Path, adapter: VLMAdapter, percentile: int = 50) -> ModelledLatency:
        """By the latency model in a file.

        Args:
            path: of the file.
            adapter: of the vision-language model.
            percentile: see the class.

        Raises:
            UserError: there is none, or it was fitted on another vision-language model.
        """
        model = LatencyModel.load(path)
        if not is_of_model(model.model, adapter, str(path)):
            raise UserError(
                f"{path} was fitted on another model; make one for this by `python -m verl_ext.controller.calibrate`"
            )
        if percentile != 50 and str(percentile) not in model.scatter:
            raise UserError(
                f"{path} does not say how far single runs are from it; make it anew by `python -m "
                "verl_ext.controller.calibrate`, or leave latency.percentile at 50"
            )
        return cls(model, percentile)

    @property
    def deciding_ms(self) -> float:
        """See `LatencySource`."""
        return self._longer * self.model.deciding_ms

    @property
    def _longer(self) -> float:
        return 1.0 if self.percentile == 50 else self.model.scatter[str(self.percentile)]

    def of_run(self, outcome: Outcome) -> float:
        """See `LatencySource`."""
        return self._longer * self.model.predict(outcome.workload).total_ms

    def of_looking(self, low: Seen, adapter: VLMAdapter) -> float:
        """See `LatencySource`."""
        return self._longer * self.model.vision_ms(adapter.num_patches(low.inputs))

    def of_deciding(self, decision: Decision) -> float:
        """See `LatencySource`."""
        return self.deciding_ms
