"""What the stage sft can refuse before torchrun starts."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_ext.config.checks import GATHERING, check_choices, require_positive, value_of
from verl_ext.errors import UserError

PACKING: dict[str, tuple[str | bool, ...]] = {"data.packing": ("auto", True, False)}
NULL_OR_AT_LEAST_ONE = ("data.max_tokens_per_gpu", "data.num_tokenizers")


def check_sft(config: DictConfig) -> None:
    """Refuse single values outside their range, and packing where attention cannot keep samples apart.

    Raises:
        UserError: the key, its value and what it may be.
    """
    check_choices(config, GATHERING | PACKING)
    for key in NULL_OR_AT_LEAST_ONE:
        if value_of(config, key) is not None:
            require_positive(key, value_of(config, key))
    if config.data.packing is True and config.model.attn_implementation == "eager":
        raise UserError(
            "data.packing=true does not work with model.attn_implementation=eager, which takes padded samples only; "
            "set one of them to auto"
        )
