"""Campaign: models of many families train, packed where they can be, with the loss and gradients of padded samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.gradients import assert_ways_agree, multi_turn
from tests.helpers.models import PACKING_FAMILIES, PADDING_FAMILIES, write_family


@pytest.mark.parametrize("name", [*PACKING_FAMILIES, *PADDING_FAMILIES])
def test_a_family_trains_as_if_padded(name: str, quickstart: Path, tmp_path: Path) -> None:
    """On one and on two ranks; `packed` is the default, which pads the samples of the second kind."""
    directory = write_family(name, quickstart, tmp_path / "family")
    packing = assert_ways_agree(multi_turn(quickstart), directory, tmp_path, ("plain", "packed"))
    assert packing == {"plain": False, "packed": name in PACKING_FAMILIES}
