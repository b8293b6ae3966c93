"""A run that resumes with another `data.train_batch_size` trains on the remaining samples of its epochs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.trainer import make_trainer, small_config
from verl_ext.trainer.sft import SFTTrainer

pytestmark = pytest.mark.usefixtures("one_rank")
DATA = ("data.train_max_samples=40", "data.val_max_samples=4", "trainer.total_epochs=3", "optim.min_lr_ratio=0.1")


def resume(quickstart: Path, run_dir: Path, *overrides: str) -> tuple[SFTTrainer, list[dict[str, float]]]:
    """Train to the end; returns the trainer and the rows of training steps that it logged."""
    trainer = make_trainer(small_config(quickstart, run_dir, *DATA, *overrides))
    first = trainer.global_step
    trainer.fit()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return trainer, [row for row in rows if "train/loss" in row and row["step"] > first]


@pytest.mark.parametrize(("steps", "batch_size", "total"), [(5, 20, 9), (5, 4, 25), (10, 40, 11), (7, 4, 23)])
def test_new_batch_size_applies_to_rest_of_epochs(
    steps: int, batch_size: int, total: int, quickstart: Path, tmp_path: Path
) -> None:
    resume(quickstart, tmp_path, f"trainer.total_training_steps={steps}")
    trainer, rows = resume(quickstart, tmp_path, f"data.train_batch_size={batch_size}")
    assert trainer.global_step == trainer.total_training_steps == rows[-1]["step"] == total
    per_step = batch_size / 40
    assert [row["train/epoch"] for row in rows] == pytest.approx(
        [steps * 8 / 40 + per_step * number for number in range(1, total - steps + 1)]
    )
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0.1 * trainer.config.optim.lr)  # the schedule ends
    events = tmp_path / "events.jsonl"
    assert not events.exists() or "lr_schedule" not in events.read_text()


def test_fewer_epochs_end_run_at_its_step(quickstart: Path, tmp_path: Path) -> None:
    resume(quickstart, tmp_path, "trainer.total_training_steps=10")
    trainer, rows = resume(quickstart, tmp_path, "data.train_batch_size=4", "trainer.total_epochs=1")
    assert trainer.global_step == trainer.total_training_steps == 10 and rows == []


def test_finished_run_stays_finished_with_another_batch_size(quickstart: Path, tmp_path: Path) -> None:
    resume(quickstart, tmp_path)
    trainer, rows = resume(quickstart, tmp_path, "data.train_batch_size=4")
    assert trainer.global_step == trainer.total_training_steps == 15 and rows == []
