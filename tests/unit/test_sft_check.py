"""Settings of packing and of token budgets that cannot work are refused."""

from __future__ import annotations

import pytest

from verl_ext.config.compose import compose_config
from verl_ext.errors import UserError
from verl_ext.launch.sft_check import check_sft


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.attn_implementation=eager", "takes padded samples alone; set data.packing=false"),
        ("data.max_tokens_per_gpu=0", "data.max_tokens_per_gpu is 0; it must be a whole number"),
        ("data.num_tokenizers=-1", "data.num_tokenizers is -1"),
        ("model.fsdp_config.keep_gathered=sometimes", "take one of auto, True, False"),
    ],
)
def test_what_cannot_work_is_refused(override: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_sft(compose_config("sft", [override]))


def test_padded_samples_take_any_attention() -> None:
    check_sft(compose_config("sft", ["model.attn_implementation=eager", "data.packing=false"]))
