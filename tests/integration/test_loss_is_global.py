"""Loss, gradients and validation are those of the whole global batch, whatever the micro-batches and the ranks.

`tests/campaigns/test_loss_is_global.py` compares more ways and single-turn data.
"""

from __future__ import annotations

from pathlib import Path

from tests.helpers.gradients import assert_ways_agree, multi_turn

WAYS = ("plain", "fused", "packed", "packed, few tokens", "packed, 1 sample")


def test_packing_micro_batches_and_ranks_change_nothing(quickstart: Path, tmp_path: Path) -> None:
    assert_ways_agree(multi_turn(quickstart), quickstart, tmp_path, WAYS)
