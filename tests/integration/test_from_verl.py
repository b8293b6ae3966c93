"""`run_sft.sh` resumes a run started by verl 0.7.0, with the same arguments and verl's losses."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.commands import environment, script_run
from tests.helpers.processes import WAIT_S
from verl_ext.checkpoint.manifest import Manifest

VERL = Path(importlib.util.find_spec("verl").origin).parent  # without importing it
WORDS = (
    "data.multiturn.enable=true", "data.max_length=256", "data.train_max_samples=36", "data.train_batch_size=8",
    "data.micro_batch_size_per_gpu=4", "model.enable_gradient_checkpointing=false", "optim.lr=1e-3",
    "trainer.default_local_dir=sft", "trainer.project_name=demo", "trainer.experiment_name=sft",
    "trainer.total_epochs=2", "trainer.save_freq=2", "trainer.logger=['file']", "trainer.device=cpu",
    # with which verl's own loss, a mean of means, is that of the whole batch; and verl's tokenization
    "data.balance_dp_token=true", "data.custom_cls.name=MultiTurnSFTDataset",
    f"data.custom_cls.path={VERL}/utils/dataset/multiturn_sft_dataset.py",
)  # fmt: skip
"""Two epochs of four steps."""


@dataclass(frozen=True)
class StockRun:
    """A run of verl itself.

    Attributes:
        run_dir: with the checkpoints 2, 4, 6 and 8.
        words: the overrides of verl's command.
        losses: by step.
        rates: the next step's learning rate by step, in thousandths.
    """

    run_dir: Path
    words: list[str]
    losses: dict[int, float]
    rates: dict[int, float]


@pytest.fixture(scope="module")
def stock(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> StockRun:
    """A complete run of verl's own command on two ranks, in new processes."""
    directory = tmp_path_factory.mktemp("stock")
    files = [f"data.{split}_files={quickstart}/{split}.parquet" for split in ("train", "val")]
    words = [*files, f"model.partial_pretrain={quickstart}/model", *WORDS]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    log = directory / "log.jsonl"
    variables = environment(PYTHONPATH=str(ROOT), VERL_FILE_LOGGER_PATH=str(log))
    command = [*torchrun, "-m", "tests.ranks.stock_verl", *words]
    result = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, timeout=WAIT_S)
    assert result.returncode == 0, result.stderr
    rows = {
        row["step"]: row["data"]
        for line in log.read_text().splitlines()
        if "train" in line
        for row in [json.loads(line)]
    }
    losses, rates = ({step: row[name] for step, row in rows.items()} for name in ("train/loss", "train/lr(1e-3)"))
    return StockRun(directory / "sft", words, losses, rates)


def killed_during_save(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "global_step_8")
    (run_dir / "global_step_6/data.pt").unlink()
    with (run_dir / "global_step_6/optim_world_size_2_rank_1.pt").open("rb+") as file:
        file.truncate(10_000)
    (run_dir / "latest_checkpointed_iteration.txt").write_text("")


def killed_early(run_dir: Path) -> None:
    for step in (4, 6, 8):
        shutil.rmtree(run_dir / f"global_step_{step}")
    (run_dir / "latest_checkpointed_iteration.txt").write_text("2")


@pytest.mark.parametrize(
    ("kill", "ranks", "step", "epoch", "warnings"),
    [
        (
            killed_during_save,
            *(2, 4, 1),
            [("tracker", "is empty"), ("global_step_6", "optim_world_size_2_rank_1.pt is truncated")],
        ),
        (killed_early, 1, 2, 0, []),
    ],
    ids=["two_ranks", "one_rank"],
)
def test_verl_run_resumes_with_same_arguments(
    kill: Callable[[Path], None],
    ranks: int,
    step: int,
    epoch: int,
    warnings: list[tuple[str, str]],
    stock: StockRun,
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "sft"
    shutil.copytree(stock.run_dir, run_dir)
    kill(run_dir)
    checkpoint = run_dir / f"global_step_{step}"
    before = digests(checkpoint)
    run = script_run("run_sft.sh", ranks, run_dir, *stock.words, cwd=tmp_path)
    result = run.finish()
    assert f"Found checkpoint: {checkpoint}\n" in result.stdout
    assert f"at sample {8 * (step % 4)} of 36 in epoch {epoch}." in result.stdout
    assert result.stderr.count(f"{run_dir} was started by verl: using recipe=verl") == 1, result.stderr
    for subject, problem in warnings:
        found = [line for line in result.stderr.splitlines() if line.startswith("warning: ") and problem in line]
        assert len(found) == 1 and subject in found[0], result.stderr
    trained = {row["step"]: row for row in run.rows() if "train/loss" in row}
    assert sorted(trained) == list(range(step + 1, 9))
    for number, row in trained.items():
        assert row["train/loss"] == pytest.approx(stock.losses[number], rel=2e-6)
        assert row["train/lr(1e-3)"] == pytest.approx(stock.rates[number - 1], rel=1e-9)
    assert digests(checkpoint) == before
    assert Manifest.read(run_dir / "global_step_8").world_size == ranks
    # unlike verl's default, which leaves them out
    assert "huggingface/model.safetensors" in Manifest.read(run_dir / "global_step_8").files


def digests(checkpoint: Path) -> dict[str, str]:
    """The digest of each file by name."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    return {str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
