"""What the stage vlm_sft can refuse before torchrun starts."""

from __future__ import annotations

import math

from omegaconf import DictConfig

from verl_ext.config.checks import (
    GATHERING,
    check_ascending,
    check_choices,
    check_ranges,
    check_without_effect,
    require_positive,
    value_of,
)
from verl_ext.errors import UserError
from verl_ext.launch.question_check import OF_TEXTS

RANGES = {  # lowest and highest value allowed
    "data.max_unreadable_images": (0, math.inf),
    "configurations.lowest_tier_steps": (0, math.inf),
    "configurations.whole_model_steps": (0, math.inf),
    "configurations.share": (0, 1),
}
AT_LEAST_ONE = ("data.questions_per_chat", "configurations.min_active")


def check_vlm_sft(config: DictConfig) -> None:
    """Refuse settings of this stage that cannot work, whatever model and data they are for.

    Raises:
        UserError: the first of them and how to mend it.
    """
    check_without_effect(config, OF_TEXTS, "on a vision-language model")
    check_choices(config, GATHERING)
    check_ranges(config, RANGES)
    for key in AT_LEAST_ONE:
        require_positive(key, value_of(config, key))
    check_ascending(config, "configurations.tier_sizes")
    check_ascending(config, "configurations.topk_choices", may_be_empty=True)
    weights, sizes = list(config.configurations.tier_weights), list(config.configurations.tier_sizes)
    are_numbers = all(isinstance(weight, int | float) and not isinstance(weight, bool) for weight in weights)
    if len(weights) != len(sizes) or not are_numbers or min(weights) < 0 or not 0 < sum(weights) < math.inf:
        raise UserError(
            f"configurations.tier_weights={weights} must be a number of 0 or more for each of the tiers {sizes}, not "
            "all of them 0"
        )
