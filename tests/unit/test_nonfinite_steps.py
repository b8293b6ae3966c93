"""Steps without an update neither replace checkpoints nor end a run as if it had succeeded."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.trainer import make_trainer, small_config
from verl_ext.checkpoint.manifest import EXPORT
from verl_ext.distributed import to_local
from verl_ext.errors import STOP_SIGNALS, Stop, UserError
from verl_ext.processes import StopSignals
from verl_ext.trainer.sft import SFTTrainer

pytestmark = pytest.mark.usefixtures("one_rank")


def start(quickstart: Path, run_dir: Path, num_steps: int = 8, keep: int = 2) -> SFTTrainer:
    words = ("trainer.save_freq=1", f"trainer.max_ckpt_to_keep={keep}", f"trainer.total_training_steps={num_steps}")
    return make_trainer(small_config(quickstart, run_dir, *words))


def spoil_losses(trainer: SFTTrainer, first: int, sends_signal: bool = False) -> None:
    """Make losses from step `first` on NaN; with `sends_signal`, also ask the run to stop at that step."""
    summed_loss = trainer.summed_loss

    def compute(micro_batch: Any) -> torch.Tensor:
        if sends_signal and trainer.global_step == first:
            os.kill(os.getpid(), signal.SIGTERM)
        return summed_loss(micro_batch) * (math.nan if trainer.global_step >= first else 1)

    trainer.summed_loss = compute  # type: ignore[method-assign]


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.glob("global_step_*"))


def test_steps_without_update_replace_no_checkpoint(quickstart: Path, tmp_path: Path) -> None:
    trainer = start(quickstart, tmp_path)
    spoil_losses(trainer, first=4)
    with pytest.raises(UserError, match="3 steps in a row, the last at step 6.*the last checkpoint is global_step_3"):
        trainer.fit()
    assert checkpoints(tmp_path) == ["global_step_2", "global_step_3"]


def test_damaged_weights_are_not_saved(quickstart: Path, tmp_path: Path) -> None:
    trainer = start(quickstart, tmp_path)
    update = trainer.optimizer.step

    def step() -> None:
        update()
        if trainer.global_step == 3:
            to_local(trainer.optimizer.param_groups[0]["params"][-1]).fill_(math.inf)

    trainer.optimizer.step = step
    with pytest.raises(UserError, match="not finite after step 3, .*the last checkpoint is global_step_2"):
        trainer.fit()
    assert checkpoints(tmp_path) == ["global_step_1", "global_step_2"]


def test_run_that_ends_without_update_fails(quickstart: Path, tmp_path: Path) -> None:
    trainer = start(quickstart, tmp_path, num_steps=3, keep=1)
    spoil_losses(trainer, first=3)
    for run in (trainer, None):  # the second start finds the finished run
        with pytest.raises(UserError, match="not finite at the last step, 3"):
            (run or start(quickstart, tmp_path, num_steps=3, keep=1)).fit()
        assert checkpoints(tmp_path) == ["global_step_2", "global_step_3"]
        assert not (tmp_path / "global_step_3" / EXPORT / "model.safetensors").exists()


def test_stop_after_step_without_update_keeps_earlier_checkpoints(quickstart: Path, tmp_path: Path) -> None:
    trainer, signals = start(quickstart, tmp_path, keep=1), StopSignals(STOP_SIGNALS)
    trainer.stop_vote.signals = signals
    spoil_losses(trainer, first=3, sends_signal=True)
    try:
        with pytest.raises(Stop):
            trainer.fit()
    finally:
        signals.uninstall()
    assert checkpoints(tmp_path) == ["global_step_2", "global_step_3"]
    resumed = start(quickstart, tmp_path, keep=1)
    assert (resumed.global_step, resumed.guard.streak) == (3, 1)
    resumed.fit()
    assert checkpoints(tmp_path) == ["global_step_8"]
