"""Campaign: models of many families train, packed where possible, with the loss and gradients of padded samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.gradients import assert_ways_agree, multi_turn
from tests.helpers.models import PACKING_FAMILIES, PADDING_FAMILIES, write_family


@pytest.mark.parametrize("name", [*PACKING_FAMILIES, *PADDING_FAMILIES])
def test_packed_family_has_loss_and_gradients_of_padded(name: str, quickstart: Path, tmp_path: Path) -> None:
    """On one and two ranks. `packed` is the default; families that cannot pack fall back to padding."""
    directory = write_family(name, quickstart, tmp_path / "family")
    packing = assert_ways_agree(multi_turn(quickstart), directory, tmp_path, ("plain", "packed"))
    assert packing == {"plain": False, "packed": name in PACKING_FAMILIES}
