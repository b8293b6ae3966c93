"""Loss, gradients and validation are those of the whole global batch, whatever the micro-batches and the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from tests.helpers import ROOT


def single_turn(quickstart: Path) -> pd.DataFrame:
    return pd.read_parquet(quickstart / "train.parquet")[["messages"]].head(16)


def multi_turn(quickstart: Path) -> pd.DataFrame:
    chats = [list(chat) for chat in pd.read_parquet(quickstart / "train.parquet")["messages"]]
    # 1 to 4 rounds in one chat, so that samples differ much in length and in loss tokens
    return pd.DataFrame({"messages": [sum(chats[4 * i : 4 * i + 1 + i % 4], []) for i in range(16)]})


def measure(quickstart: Path, data: pd.DataFrame, ranks: int, tmp_path: Path) -> dict:
    data.to_parquet(tmp_path / "data.parquet")
    output = tmp_path / f"ranks{ranks}.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = [str(Path(__file__).with_name("gradients_on_ranks.py")), str(quickstart), str(tmp_path / "data.parquet")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *script, str(output)], check=True, env=environment, timeout=300)
    return torch.load(output)


@pytest.mark.parametrize("chats", [single_turn, multi_turn])
def test_packing_micro_batches_and_ranks_change_nothing(chats: object, quickstart: Path, tmp_path: Path) -> None:
    results = {ranks: measure(quickstart, chats(quickstart), ranks, tmp_path) for ranks in (1, 2)}
    reference = results[1]["plain"]
    for ranks in (1, 2):
        for way, result in results[ranks].items():
            assert result["loss"] == pytest.approx(reference["loss"], rel=1e-5), (ranks, way)
            assert result["again"] == pytest.approx(reference["loss"], rel=1e-5), (ranks, way)
            assert result["validation"]["val/loss"] == pytest.approx(reference["validation"]["val/loss"], rel=1e-5)
            assert result["validation"]["val/num_loss_tokens"] == reference["validation"]["val/num_loss_tokens"]
            for name, gradient in reference["gradients"].items():
                error = (result["gradients"][name] - gradient).norm() / gradient.norm()
                assert error < 1e-5, (ranks, way, name)
