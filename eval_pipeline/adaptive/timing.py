"""Milliseconds of what was run: as measured, or by the run's latency model, which gives the same each time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.execution import Outcome, Seen
from verl_ext.controller.inference import Decision
from verl_ext.controller.latency_model import LatencyModel, Workload


@dataclass(frozen=True)
class Timing:
    """Where latencies come from.

    Attributes:
        model: by which they are told; None takes them as they were measured.
    """

    model: LatencyModel | None = None

    def of_outcome(self, outcome: Outcome) -> float:
        """Of a configuration, the encoding of the image included."""
        return outcome.latency.total_ms if self.model is None else self.model.predict(outcome.workload).total_ms

    def of_decision(self, decision: Decision, low: Seen, adapter: VLMAdapter) -> float:
        """Of what deciding adds; by the model that is the encoding alone, as it knows nothing of the controller.

        Args:
            decision: of the controller.
            low: the image at the lowest tier.
            adapter: of the model.
        """
        if self.model is None:
            return decision.total_ms(low.vision_ms)
        encoding = self.model.predict(Workload(decision.configuration, adapter.num_patches(low.inputs), 0, 0))
        return replace(decision, features_ms=0.0, network_ms=0.0, choice_ms=0.0).total_ms(encoding.vision_ms)
