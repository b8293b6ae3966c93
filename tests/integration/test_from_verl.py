"""A run that verl 0.7.0 itself began goes on with `run_sft.sh` and the same words, as verl would have gone on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import verl.utils.dataset.multiturn_sft_dataset

from tests.helpers import ROOT

TIMEOUT_S = 120
WORDS = (
    "data.multiturn.enable=true", "data.max_length=256", "data.train_max_samples=36", "data.train_batch_size=8",
    "data.micro_batch_size_per_gpu=4", "model.enable_gradient_checkpointing=false", "optim.lr=1e-3",
    "trainer.default_local_dir=sft", "trainer.project_name=demo", "trainer.experiment_name=sft",
    "trainer.total_epochs=2", "trainer.save_freq=2", "trainer.logger=['file']", "trainer.device=cpu",
    # where verl's own loss, a mean of means, is that of the whole batch, and verl's tokens, not this pipeline's
    "data.balance_dp_token=true", "data.custom_cls.name=MultiTurnSFTDataset",
    f"data.custom_cls.path={verl.utils.dataset.multiturn_sft_dataset.__file__}",
)  # fmt: skip
"""Two epochs of four steps."""


@dataclass(frozen=True)
class StockRun:
    """What verl itself left.

    Attributes:
        run_dir: with the checkpoints 2, 4, 6 and 8.
        words: its overrides.
        losses: by step.
        rates: the next step's learning rate by step, in thousandths.
    """

    run_dir: Path
    words: list[str]
    losses: dict[int, float]
    rates: dict[int, float]


@pytest.fixture(scope="module")
def stock(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> StockRun:
    """verl's own command on two ranks, to its end."""
    directory = tmp_path_factory.mktemp("stock")
    files = [f"data.{split}_files={quickstart}/{split}.parquet" for split in ("train", "val")]
    words = [*files, f"model.partial_pretrain={quickstart}/model", *WORDS]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    log = directory / "log.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "VERL_FILE_LOGGER_PATH": str(log)}
    run = {"cwd": directory, "env": environment, "capture_output": True, "text": True, "timeout": TIMEOUT_S}
    result = subprocess.run([*torchrun, "-m", "tests.ranks.stock_verl", *words], **run)
    assert result.returncode == 0, result.stderr
    rows = {
        row["step"]: row["data"]
        for line in log.read_text().splitlines()
        if "train" in line
        for row in [json.loads(line)]
    }
    losses, rates = ({step: row[name] for step, row in rows.items()} for name in ("train/loss", "train/lr(1e-3)"))
    return StockRun(directory / "sft", words, losses, rates)


def killed_in_the_middle_of_a_save(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "global_step_8")
    (run_dir / "global_step_6/data.pt").unlink()
    with (run_dir / "global_step_6/optim_world_size_2_rank_1.pt").open("rb+") as file:
        file.truncate(10_000)
    (run_dir / "latest_checkpointed_iteration.txt").write_text("")


def killed_early(run_dir: Path) -> None:
    for step in (4, 6, 8):
        shutil.rmtree(run_dir / f"global_step_{step}")
    (run_dir / "latest_checkpointed_iteration.txt").write_text("2")


CUT_SHORT = "warning: global_step_6 cannot be resumed: its file optim_world_size_2_rank_1.pt is cut short"


@pytest.mark.parametrize(
    ("kill", "ranks", "step", "epoch", "warnings"),
    [
        (killed_in_the_middle_of_a_save, 2, 4, 1, ["warning: the tracker file is empty", CUT_SHORT]),
        (killed_early, 1, 2, 0, []),
    ],
    ids=["two_ranks", "one_rank"],
)
def test_a_run_of_verl_goes_on_with_the_same_words(
    kill: Callable[[Path], None],
    ranks: int,
    step: int,
    epoch: int,
    warnings: list[str],
    stock: StockRun,
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "sft"
    shutil.copytree(stock.run_dir, run_dir)
    kill(run_dir)
    checkpoint = run_dir / f"global_step_{step}"
    before = digests(checkpoint)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VERL_EXT_PYTHON": sys.executable}
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": TIMEOUT_S}
    result = subprocess.run(["bash", ROOT / "run_sft.sh", str(ranks), *stock.words], **run)
    assert result.returncode == 0, result.stderr
    assert f"Found checkpoint: {checkpoint}\n" in result.stdout
    seen = 8 * (step % 4)
    assert f"in verl's order of the data, {seen} of 36 samples into epoch {epoch}, " in result.stdout
    for sentence in [f"verl itself began {run_dir}: recipe=verl", *warnings]:
        assert result.stderr.count(sentence) == 1, result.stderr
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = {row["step"]: row for row in rows if "train/loss" in row}
    assert sorted(trained) == list(range(step + 1, 9))
    for number, row in trained.items():
        assert row["train/loss"] == pytest.approx(stock.losses[number], rel=2e-6)
        assert row["train/lr(1e-3)"] == pytest.approx(stock.rates[number - 1], rel=1e-9)
    assert digests(checkpoint) == before
    assert json.loads((run_dir / "global_step_8/manifest.json").read_text())["world_size"] == ranks


def digests(checkpoint: Path) -> dict[str, str]:
    """Of each file by its name."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    return {str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
