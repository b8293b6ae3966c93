"""Where a latency comes from: as it was measured, or as the latency model says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.execution import Outcome, Seen
from verl_ext.controller.inference import Decision
from verl_ext.controller.latency_model import LatencyModel
from verl_ext.controller.loading import fingerprint
from verl_ext.errors import UserError


class LatencySource(ABC):
    """Milliseconds of what was run."""

    is_measured: bool
    """Whether they are other ones when the same is run again."""

    @abstractmethod
    def of_run(self, outcome: Outcome) -> float:
        """Of running a configuration, the encoding of the image included."""

    @abstractmethod
    def of_looking(self, low: Seen, adapter: VLMAdapter) -> float:
        """Of encoding an image at the lowest tier, by which a configuration is chosen."""

    @abstractmethod
    def of_deciding(self, decision: Decision) -> float:
        """Of what the controller itself takes, beside that encoding."""


class MeasuredLatency(LatencySource):
    """As it was measured."""

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
    """As a latency model says: the same in every run. It knows nothing of the controller, which takes no time by it.

    Attributes:
        model: fitted on this machine, for this vision-language model.
    """

    model: LatencyModel
    is_measured = False

    @classmethod
    def load(cls, path: Path, adapter: VLMAdapter) -> ModelledLatency:
        """By the latency model in a file.

        Raises:
            UserError: there is none, or it was fitted on another vision-language model.
        """
        model = LatencyModel.load(path)
        if model.model != fingerprint(adapter.model):
            raise UserError(
                f"{path} was fitted on another model; make one for this by `python -m verl_ext.controller.calibrate`"
            )
        return cls(model)

    def of_run(self, outcome: Outcome) -> float:
        """See `LatencySource`."""
        return self.model.predict(outcome.workload).total_ms

    def of_looking(self, low: Seen, adapter: VLMAdapter) -> float:
        """See `LatencySource`."""
        return self.model.vision_ms(adapter.num_patches(low.inputs))

    def of_deciding(self, decision: Decision) -> float:
        """See `LatencySource`."""
        return 0.0
