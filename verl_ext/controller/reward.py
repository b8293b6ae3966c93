"""What running a configuration for a sample was worth, in five parts."""

from __future__ import annotations

import math
from dataclasses import dataclass

NAMES = tuple(f"reward_{part}" for part in ("accuracy", "latency", "violation", "complexity", "efficiency"))


@dataclass(frozen=True)
class RewardWeights:
    """Weights of the parts; none has a unit.

    Attributes:
        accuracy: alpha.
        latency_penalty: beta.
        budget_violation: gamma.
        efficiency: delta.
        complexity: epsilon.
    """

    accuracy: float = 1.0
    latency_penalty: float = 0.5
    budget_violation: float = 10.0
    efficiency: float = 0.1
    complexity: float = 0.05

    def parts(self, accuracy: float, latency_ms: float, budget_ms: float, complexity: float) -> dict[str, float]:
        """Weighted contributions by the names in `NAMES`, penalties negative; the reward is their sum.

        With r = latency / budget: the latency penalty is sigmoid(10 * (r - 1)), which grows smoothly around the budget;
        the violation is max(0, r - 1) squared; the efficiency is max(0, 1 - r), what of the budget is left.

        Args:
            accuracy: of the answer, from 0 to 1.
            latency_ms: milliseconds that it took.
            budget_ms: milliseconds that it was allowed.
            complexity: share of the model that ran, from 0 to 1; see `ConfigurationSpace.complexity`.
        """
        ratio = latency_ms / budget_ms
        return {
            "reward_accuracy": self.accuracy * accuracy,
            "reward_latency": -self.latency_penalty * _sigmoid(10 * (ratio - 1)),
            "reward_violation": -self.budget_violation * max(0.0, ratio - 1) ** 2,
            "reward_complexity": -self.complexity * complexity,
            "reward_efficiency": self.efficiency * max(0.0, 1 - ratio),
        }


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0
