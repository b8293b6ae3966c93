"""Compares loss, gradients and validation of one global batch between ways to compute them and numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.commands import torchrun

if TYPE_CHECKING:
    import pandas as pd


def single_turn(quickstart: Path) -> pd.DataFrame:
    """Sixteen chats of one round."""
    import pandas as pd

    return pd.read_parquet(quickstart / "train.parquet")[["messages"]].head(16)


def multi_turn(quickstart: Path) -> pd.DataFrame:
    """Sixteen chats of 1 to 4 rounds, so that samples differ much in length and in loss tokens."""
    import pandas as pd

    chats = [list(chat) for chat in pd.read_parquet(quickstart / "train.parquet")["messages"]]
    return pd.DataFrame({"messages": [sum(chats[4 * i : 4 * i + 1 + i % 4], []) for i in range(16)]})


def assert_ways_agree(
    data: pd.DataFrame, quickstart: Path, directory: Path, ways: Iterable[str] = ()
) -> dict[str, bool]:
    """Check that all ways agree on one and two ranks; return which of the ways pack samples.

    Args:
        data: the chats.
        quickstart: directory of the `quickstart` fixture.
        directory: an empty one.
        ways: keys of `WAYS` in `tests/ranks/gradients.py`, the first of which is the reference; none for all of them.
    """
    data.to_parquet(directory / "data.parquet")
    ways = tuple(ways)
    results = {num_ranks: measured(num_ranks, quickstart, directory, *ways) for num_ranks in (1, 2)}
    assert results[1].keys() == results[2].keys() >= set(ways)
    reference = next(iter(results[1].values()))
    validation = reference["validation"]
    for num_ranks in (1, 2):
        for way, result in results[num_ranks].items():
            assert result["loss"] == pytest.approx(reference["loss"], rel=1e-5), (num_ranks, way)
            assert result["again"] == pytest.approx(reference["loss"], rel=1e-5), (num_ranks, way)
            assert result["validation"]["val/loss"] == pytest.approx(validation["val/loss"], rel=1e-5), (num_ranks, way)
            assert result["validation"]["val/num_loss_tokens"] == validation["val/num_loss_tokens"], (num_ranks, way)
            for name, gradient in reference["gradients"].items():
                error = (result["gradients"][name] - gradient).norm() / gradient.norm()
                assert error < 1e-5, (num_ranks, way, name)
    packing = [{way: result["packs"] for way, result in found.items()} for found in results.values()]
    assert packing[0] == packing[1]
    return packing[0]


def measured(num_ranks: int, quickstart: Path, directory: Path, *ways: str) -> dict[str, Any]:
    """The results of `tests/ranks/gradients.py` for `data.parquet` on this many ranks."""
    import torch

    output = directory / f"ranks_{num_ranks}.pt"
    torchrun(num_ranks, "tests.ranks.gradients", quickstart, directory / "data.parquet", output, *ways)
    return torch.load(output)
