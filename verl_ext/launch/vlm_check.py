"""What the stage vlm_sft can refuse before torchrun starts."""

from __future__ import annotations

import math

from omegaconf import DictConfig

from verl_ext.config.checks import check_ranges, require_positive, value_of
from verl_ext.errors import UserError
from verl_ext.launch.question_check import check_questions

_OF_LANGUAGE_MODELS = {  # settings of the stage sft: the value they must keep here
    "data.train_files": None,
    "data.val_files": None,
    "data.custom_cls.path": None,
    "data.balance_dp_token": False,
    "model.lora_rank": 0,
    "model.use_liger": False,
    "model.enable_gradient_checkpointing": False,
    "use_remove_padding": False,
    "ulysses_sequence_parallel_size": 1,
    "eval.watch": False,
}
_COUNTS = ("data.max_unreadable_images", "configurations.lowest_tier_steps", "configurations.whole_model_steps")


def check_vlm_sft(config: DictConfig) -> None:
    """Refuse settings of this stage that cannot work.

    Raises:
        UserError: the first of them and how to mend it.
    """
    for key, unused in _OF_LANGUAGE_MODELS.items():
        if value_of(config, key) != unused:
            raise UserError(f"{key} has no effect on a vision-language model; leave it at {unused}")
    check_ranges(config, dict.fromkeys(_COUNTS, (0, math.inf)) | {"configurations.share": (0, 1)})
    for key in ("data.questions_per_chat", "configurations.min_active"):
        require_positive(key, value_of(config, key))
    weights, sizes = list(config.configurations.tier_weights), list(config.configurations.tier_sizes)
    if len(weights) != len(sizes) or not all(weight >= 0 for weight in weights) or not sum(weights) > 0:
        raise UserError(
            f"configurations.tier_weights={weights} must be a number of 0 or more for each of the tiers {sizes}, not "
            "all of them 0"
        )
    check_questions(config, ("train",))
