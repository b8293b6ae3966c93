"""Configuration of the budget controller and its vision-language model, and constants that do not need torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from verl_ext.config.schema import setting
from verl_ext.errors import UserError
from verl_ext.grpo.config import ActorConfig

Percentile = Literal[50, 75, 90, 95]
PERCENTILES: tuple[int, ...] = get_args(Percentile)
"""Percentiles of single runs that a latency model records."""
VLMPrecision = Literal["auto", "bf16", "fp32"]
MAX_BUDGET_MS = 1e9
"""Maximum budget, more than eleven days."""


@dataclass(kw_only=True)
class BudgetActorConfig(ActorConfig):
    """`actor` of the budget controller."""

    tier_entropy_weight: float = setting(1.0, "Weight of the tier's entropy", ge=0)


@dataclass(kw_only=True)
class ControllerConfig:
    """`controller`: the controller's possible configurations, its budgets, and its network."""

    budgets_ms: list[float] = setting([170.0, 380.0], "Minimum and maximum latency budget")
    budgets_of_full: list[float] | None = setting(
        None, "The same as fractions of the full model's latency at latency.percentile; replaces budgets_ms"
    )
    tier_sizes: list[int] = setting([3, 6, 12], "Size of each tier: crops (Molmo), pixels (Qwen)")
    min_active: int = setting(12, "Fewest active blocks, including block 0", ge=1)
    max_active: int = setting(16, "Most active blocks", ge=1)
    topk_choices: list[int] = setting(
        [4, 5, 6, 7, 8], "Experts per token, the pretrained top-k last; [] without experts"
    )
    hidden: int = setting(256, "Hidden size of the controller's perceptron", ge=1)
    dropout: float = setting(0.1, "Dropout during updates", ge=0, le=0.99)
    importance_file: str | None = setting(None, "Output of `verl_ext.controller.importance`")
    init_from: str | None = setting(
        None, "Initial controller: best_model.pt, checkpoint_epoch_N.pt, an export, a checkpoint or a run directory"
    )
    max_new_tokens: int = setting(16, "Maximum answer tokens", ge=1)
    dtype: VLMPrecision = setting(
        "auto", "dtype of the vision-language model; auto: bf16 on GPUs that support it, else fp32"
    )
    max_encodings: int = setting(256, "Maximum encoded images to cache", ge=1)

    def check(self) -> None:
        """Refuse tiers, experts and budgets that are not ascending."""
        require_ascending("controller.tier_sizes", self.tier_sizes)
        require_ascending("controller.topk_choices", self.topk_choices, may_be_empty=True)
        require_budgets("controller.budgets_ms", self.budgets_ms, "numbers of milliseconds", MAX_BUDGET_MS)
        if self.budgets_of_full is not None:
            require_budgets("controller.budgets_of_full", self.budgets_of_full, "fractions of the full model's latency")


@dataclass(kw_only=True)
class LatencyConfig:
    """`latency`: the source of latencies in rewards."""

    source: Literal["model", "measured"] = setting("model", "Latency in rewards: from the latency model, or measured")
    file: str | None = setting(
        None,
        "Output of `verl_ext.controller.calibrate`; null: the run's latency_model.json",
    )
    configurations: int = setting(100, "Configurations to measure for latency_model.json", ge=10)
    repeats: int = setting(9, "Measurements per configuration", ge=1)
    percentile: Percentile = setting(50, "Latency percentile used in rewards")
    validation: Literal["same", "measured"] = setting("same", "Latency in evaluations: as in training, or measured")


@dataclass(kw_only=True)
class BudgetRewardConfig:
    """`reward`: weights of the controller's reward."""

    accuracy: float = setting(1.0, "Weight of a correct answer", ge=0)
    latency_penalty: float = setting(0.5, "Weight of the penalty around the budget", ge=0)
    budget_violation: float = setting(10.0, "Weight of the squared excess over the budget", ge=0)
    efficiency: float = setting(0.1, "Weight of the unused fraction of the budget", ge=0)
    complexity: float = setting(0.05, "Weight of the fraction of the model that ran", ge=0)


@dataclass(kw_only=True)
class SkipSamplingConfig:
    """`configurations`: the configurations that SFT of a vision-language model samples from."""

    share: float = setting(0.75, "Fraction of micro-batches with a sampled configuration", ge=0, le=1)
    tier_sizes: list[int] = setting([65536, 262144, 1048576], "Image pixels of each tier")
    tier_weights: list[float] = setting([1.0, 1.0, 1.0], "Weight of each tier", ge=0)
    lowest_tier_steps: int = setting(0, "Initial steps at the lowest tier", ge=0)
    full_model_steps: int = setting(0, "Initial steps with the full model", ge=0)
    min_active: int = setting(1, "Fewest active blocks, including block 0", ge=1)
    topk_choices: list[int] = setting([], "Experts per token, the pretrained top-k last; [] without experts")

    def check(self) -> None:
        """Refuse tiers and experts that are not ascending, and tiers without a weight."""
        require_ascending("configurations.tier_sizes", self.tier_sizes)
        require_ascending("configurations.topk_choices", self.topk_choices, may_be_empty=True)
        if len(self.tier_weights) != len(self.tier_sizes) or not 0 < sum(self.tier_weights) < math.inf:
            raise UserError(
                f"configurations.tier_weights={self.tier_weights} must have a number of at least 0 for each of the "
                f"tiers {self.tier_sizes}, not all of them 0"
            )


def require_ascending(key: str, values: Sequence[int], may_be_empty: bool = False) -> None:
    """Refuse a list that does not consist of ascending integers of at least 1."""
    if any(value < 1 for value in values) or list(values) != sorted(set(values)) or not (values or may_be_empty):
        raise UserError(f"{key} is {list(values)}; it must be a list of ascending integers of at least 1")


def require_budgets(key: str, budgets: Sequence[float], unit: str, largest: float = math.inf) -> None:
    """Refuse budgets that are not two ascending positive finite numbers up to `largest`."""
    if len(budgets) != 2 or not 0 < budgets[0] <= budgets[1] <= largest or math.isinf(budgets[1]):
        bound = "" if math.isinf(largest) else f" up to {largest:,.0f}"
        raise UserError(f"{key} is {list(budgets)}; it must be two ascending, positive and finite {unit}{bound}")
