"""Settings of packing and of token budgets that cannot work are refused."""

from __future__ import annotations

import pytest

from verl_ext.config.compose import compose_config
from verl_ext.errors import UserError
from verl_ext.launch.sft_check import check_sft


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.packing=sometimes", "take one of auto, True, False"),
        ("data.max_tokens_per_gpu=0", "data.max_tokens_per_gpu is 0; it must be a whole number"),
        ("data.num_tokenizers=-1", "data.num_tokenizers is -1"),
        ("model.fsdp_config.keep_gathered=sometimes", "take one of auto, True, False"),
    ],
)
def test_what_cannot_work_is_refused(override: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_sft(compose_config("sft", [override]))


def test_packing_is_refused_with_eager_attention_only_where_it_is_asked_for() -> None:
    check_sft(compose_config("sft", ["model.attn_implementation=eager"]))
    with pytest.raises(UserError, match="data.packing=true .*model.attn_implementation=eager"):
        check_sft(compose_config("sft", ["model.attn_implementation=eager", "data.packing=true"]))
