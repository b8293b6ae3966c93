"""A stop abandons the step in progress if the grace period is too short for it and a save."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock, patch

import pytest
import torch

from tests.helpers.trainer import make_trainer, small_config
from verl_ext.checkpoint.manifest import EXPORT, read_complete
from verl_ext.errors import STOP_SIGNALS, Stop
from verl_ext.processes import StopSignals
from verl_ext.trainer.preemption import StopVote
from verl_ext.trainer.sft import SFTTrainer

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    signals = StopSignals(STOP_SIGNALS)
    yield signals
    signals.uninstall()


def losses(run_dir: Path) -> dict[int, float]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def start(quickstart: Path, run_dir: Path, grace_s: float) -> SFTTrainer:
    settings = ("trainer.total_training_steps=4", "data.packing=false", f"trainer.preemption.grace_s={grace_s}")
    return make_trainer(small_config(quickstart, run_dir, *settings))


def signal_in_step(trainer: SFTTrainer, number: int) -> list[torch.Tensor]:
    """Send SIGTERM in the first of two micro-batches of a step; return the random state before it, once it is known."""
    random_states: list[torch.Tensor] = []
    summed_loss = trainer.summed_loss

    def compute(micro_batch: Any) -> torch.Tensor:
        if trainer.global_step == number and not random_states:
            random_states.append(torch.get_rng_state())
            torch.rand(1)  # as dropout does
            os.kill(os.getpid(), signal.SIGTERM)
        return summed_loss(micro_batch)

    trainer.summed_loss = compute  # type: ignore[method-assign]
    return random_states


def test_resumed_run_repeats_abandoned_step(
    quickstart: Path, tmp_path: Path, signals: StopSignals, capfd: pytest.CaptureFixture[str]
) -> None:
    start(quickstart, tmp_path / "undisturbed", grace_s=120).fit()
    run_dir = tmp_path / "run"
    trainer = start(quickstart, run_dir, grace_s=0.001)
    trainer.stop_vote.signals = signals
    random_states = signal_in_step(trainer, 3)
    with pytest.raises(Stop, match="SIGTERM"):
        trainer.fit()
    assert "Step 3 is abandoned" in capfd.readouterr().out
    assert list(losses(run_dir)) == [1, 2] and torch.equal(torch.get_rng_state(), random_states[0])
    manifest = read_complete(run_dir / "global_step_2")
    assert manifest.metrics["train/loss"] == losses(run_dir)[2] and manifest.deferred == (EXPORT,)
    resumed = start(quickstart, run_dir, grace_s=120)
    assert resumed.global_step == 2
    resumed.fit()
    assert losses(run_dir) == losses(tmp_path / "undisturbed")


def test_step_is_completed_if_time_is_left(quickstart: Path, tmp_path: Path, signals: StopSignals) -> None:
    trainer = start(quickstart, tmp_path, grace_s=120)
    trainer.stop_vote.signals = signals
    signal_in_step(trainer, 3)
    with pytest.raises(Stop, match="SIGTERM"):
        trainer.fit()
    assert list(losses(tmp_path)) == [1, 2, 3] and (tmp_path / "global_step_3").exists()


def test_validation_expects_to_wait_for_background_save(quickstart: Path, tmp_path: Path) -> None:
    trainer = start(quickstart, tmp_path, grace_s=120)
    trainer.checkpoint_manager._background = Future()  # never ends
    trainer.stop_vote.deadline = time.time() + 1000
    trainer.stop_vote.note(step_s=1.0, save_s=600.0)  # time for one save, but not for two
    assert trainer.val_dataset is not None
    with pytest.raises(Stop, match="the deadline"):
        trainer.validate()


def test_interrupted_validation_is_repeated_once(quickstart: Path, tmp_path: Path, signals: StopSignals) -> None:
    """Also if the run is killed before it saves again."""

    def start_run() -> tuple[SFTTrainer, Mock]:
        trainer = make_trainer(
            small_config(quickstart, tmp_path, "trainer.total_training_steps=4", "trainer.test_freq=2")
        )
        return trainer, patch.object(trainer, "validate", wraps=trainer.validate).start()

    trainer, validate = start_run()
    trainer.stop_vote.signals = signals

    def interrupt() -> Any:
        assert trainer.stop_vote.can_interrupt
        if trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return DEFAULT

    validate.side_effect = interrupt
    with pytest.raises(Stop, match="SIGTERM"):
        trainer.fit()
    for num_validations in (1, 0):
        trainer, validate = start_run()
        assert trainer.global_step == 2 and trainer.owes_validation
        trainer.training_step = Mock(side_effect=KeyboardInterrupt)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
        assert validate.call_count == num_validations
        assert "val/loss" in read_complete(tmp_path / "global_step_2").metrics


def test_fast_steps_are_never_abandoned(signals: StopSignals) -> None:
    vote = StopVote(signals, None, grace_s=10.0)
    vote.note(step_s=7.0, save_s=2.0)
    vote.raise_if_stopping()
    signals.received.append(signal.SIGTERM)
    vote.raise_if_interrupted()
    with pytest.raises(Stop):
        vote.raise_if_stopping()


def test_signal_interrupts_validation_but_not_a_fast_step(signals: StopSignals) -> None:
    vote = StopVote(signals, None, grace_s=10.0)
    vote.note(step_s=7.0, save_s=2.0)
    vote.raise_if_stopping()
    signals.received.append(signal.SIGTERM)
    assert not vote.is_interrupted()
    with vote.validation():
        assert vote.is_interrupted()
        with pytest.raises(Stop, match="SIGTERM"):
            vote.wait_unless_interrupted(lambda: True)
    assert not vote.is_interrupted()


@pytest.mark.parametrize(
    ("elapsed_s", "rest_s", "is_writing", "is_late"),
    [
        (1.0, 0.0, False, False),
        (1.0, 1.0, False, False),
        (1.0, 1.0, True, True),
        (1.0, 3.0, False, True),
        (8.0, 0.0, False, True),
    ],
)
def test_step_that_becomes_slow_is_abandoned_in_time(
    elapsed_s: float, rest_s: float, is_writing: bool, is_late: bool, signals: StopSignals
) -> None:
    """Earlier steps fit into the grace period, but this one waits until only the rest of a step and a save do."""
    vote = StopVote(signals, None, grace_s=10.0)
    vote.note(step_s=3.0, save_s=2.0)
    vote.longest_rest_s = rest_s
    vote.raise_if_stopping(is_writing)
    signals.received.append(signal.SIGTERM)
    signals.asked_at = time.monotonic() - elapsed_s
    assert vote.is_interrupted() == is_late
    with pytest.raises(Stop, match="SIGTERM") if is_late else nullcontext():
        vote.wait_unless_interrupted(lambda: is_late)


def test_wait_without_signal_ends_with_the_last_reward() -> None:
    vote = StopVote(StopSignals(STOP_SIGNALS), None, grace_s=10.0)
    vote.note(step_s=9.0, save_s=2.0)
    vote.raise_if_stopping()
    answers = iter(("a slow reward", "a slow reward", ""))
    vote.wait_unless_interrupted(lambda: next(answers))
    assert next(answers, None) is None
