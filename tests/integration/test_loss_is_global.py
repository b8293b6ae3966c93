"""Loss, gradients and validation are those of the whole global batch, for any micro-batches and number of ranks.

`tests/campaigns/test_loss_is_global.py` compares more ways and single-turn data.
"""

from __future__ import annotations

from pathlib import Path

from tests.helpers.gradients import assert_ways_agree, multi_turn
from tests.helpers.models import write_family

WAYS = ("plain", "fused", "packed", "packed, few tokens", "packed, 1 sample")


def test_loss_is_independent_of_packing_micro_batches_and_ranks(quickstart: Path, tmp_path: Path) -> None:
    assert_ways_agree(multi_turn(quickstart), quickstart, tmp_path, WAYS)


def test_ranks_agree_to_pad_model_that_cannot_pack(quickstart: Path, tmp_path: Path) -> None:
    """`packed` is the default; StableLM ignores sample boundaries."""
    directory = write_family("stablelm", quickstart, tmp_path / "stablelm")
    packing = assert_ways_agree(multi_turn(quickstart), directory, tmp_path, ("plain", "packed"))
    assert packing == {"plain": False, "packed": False}
