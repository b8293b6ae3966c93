"""Loss, gradients and validation in every way to compute them, for single-turn and multi-turn data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.gradients import assert_ways_agree, multi_turn, single_turn

if TYPE_CHECKING:
    import pandas as pd


@pytest.mark.parametrize("chats", [single_turn, multi_turn])
def test_loss_is_independent_of_packing_micro_batches_and_ranks(
    chats: Callable[[Path], pd.DataFrame], quickstart: Path, tmp_path: Path
) -> None:
    assert_ways_agree(chats(quickstart), quickstart, tmp_path)
