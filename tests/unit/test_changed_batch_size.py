"""A run that resumes with another `data.train_batch_size` trains on the remaining samples of its epochs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.trainer import make_trainer, small_config
from verl_ext.errors import UserError
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


def test_checkpoint_of_another_run_is_refused_with_other_data(quickstart: Path, tmp_path: Path) -> None:
    """Another name would not help, because the run is already a new one."""
    resume(quickstart, tmp_path / "one", "trainer.total_training_steps=1")
    checkpoint = tmp_path / "one" / "global_step_1"
    says = f"saved with 40 .*, or start from its weights with model.partial_pretrain={checkpoint}/huggingface trainer.r"
    with pytest.raises(UserError, match=says):
        resume(quickstart, tmp_path / "two", "data.train_max_samples=32", f"trainer.resume_from_path={checkpoint}")
    with pytest.raises(UserError, match="or start a new run with another trainer.experiment_name"):
        resume(quickstart, tmp_path / "one", "data.train_max_samples=32")
