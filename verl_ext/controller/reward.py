"""What running a configuration for a sample was worth, in five parts."""

from __future__ import annotations

import math

from verl_ext.controller.config import BudgetRewardConfig

NAMES = tuple(f"reward_{part}" for part in ("accuracy", "latency", "violation", "complexity", "efficiency"))


def reward_parts(
    weights: BudgetRewardConfig, accuracy: float, latency_ms: float, budget_ms: float, complexity: float
) -> dict[str, float]:
    """Weighted contributions by the names in `NAMES`, penalties negative; the reward is their sum.

    With r = latency / budget: the latency penalty is sigmoid(10 * (r - 1)), which grows smoothly around the budget;
    the violation is max(0, r - 1) squared; the efficiency is max(0, 1 - r), what of the budget is left.

    Args:
        weights: of the parts; none has a unit.
        accuracy: of the answer, from 0 to 1.
        latency_ms: milliseconds that it took.
        budget_ms: milliseconds that it was allowed.
        complexity: share of the model that ran, from 0 to 1; see `ConfigurationSpace.complexity`.
    """
    ratio = latency_ms / budget_ms
    return {
        "reward_accuracy": weights.accuracy * accuracy,
        "reward_latency": -weights.latency_penalty * _sigmoid(10 * (ratio - 1)),
        "reward_violation": -weights.budget_violation * max(0.0, ratio - 1) ** 2,
        "reward_complexity": -weights.complexity * complexity,
        "reward_efficiency": weights.efficiency * max(0.0, 1 - ratio),
    }


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0
