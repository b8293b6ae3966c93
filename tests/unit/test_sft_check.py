"""Settings of packing and token budgets that cannot work are rejected."""

from __future__ import annotations

import pytest

from verl_ext.errors import UserError
from verl_ext.trainer.stages import load_config


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.packing=sometimes", "must be auto, true or false"),
        ("data.max_tokens_per_gpu=0", "data.max_tokens_per_gpu is 0; it must be an integer"),
        ("data.num_tokenizers=-1", "data.num_tokenizers is -1"),
        ("model.fsdp_config.model_dtype=fp16", "must be fp32 or bf16"),  # the first AdamW update would not be finite
        ("model.fsdp_config.keep_gathered=sometimes", "must be auto, true or false"),
    ],
)
def test_rejects_settings_that_cannot_work(override: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_config("sft", [override])


def test_rejects_eager_attention_only_with_explicit_packing() -> None:
    load_config("sft", ["model.attn_implementation=eager"])
    with pytest.raises(UserError, match="data.packing=true .*model.attn_implementation=eager"):
        load_config("sft", ["model.attn_implementation=eager", "data.packing=true"])
