"""A run that receives a stop request saves after the current step, and the same command resumes without loss.

`tests/campaigns/test_saves.py` has other signals and receivers.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import faults
from tests.helpers.commands import Hold, SFTRun, end_of
from tests.helpers.processes import wait_until
from verl_ext.checkpoint.manifest import Manifest
from verl_ext.errors import STOPPED_EXIT_CODE

RARELY = "trainer.save_freq=-1"


@pytest.mark.parametrize(
    ("number", "receiver", "in_background"),
    [(signal.SIGTERM, "launcher", True), (signal.SIGUSR1, "rank 1", False)],
)
def test_stop_loses_no_step(
    number: signal.Signals, receiver: str, in_background: bool, sft_run: SFTRun, quickstart: Path, tmp_path: Path
) -> None:
    override = f"trainer.checkpoint.async_save={in_background}"
    faults.assert_stop_loses_no_step(number, receiver, override, sft_run, quickstart, tmp_path)


def test_repeated_signals_lose_no_step(quickstart: Path, tmp_path: Path) -> None:
    """As from a scheduler that signals the launcher, and later all processes of the job."""
    run = SFTRun(quickstart, tmp_path / "run", "trainer.save_freq=3")
    with run.held(Hold("verl_ext.checkpoint.save", "CheckpointWriter.prepare"), tmp_path) as held:
        ranks = list(held.ranks().values())
        held.process.send_signal(signal.SIGTERM)
        assert not ends_within(1.2, held.process)
        for number in (signal.SIGTERM, signal.SIGINT):
            for process in (held.process, *ranks):
                process.send_signal(number)
        assert not ends_within(0.5, held.process)
        stopped = held.release()
    assert stopped.returncode == STOPPED_EXIT_CODE, stopped.stderr
    assert "Stopped by SIGTERM after step 3" in stopped.stdout
    assert (run.names(), run.tracker(), run.record()["status"]) == ({"3"}, "3", "stopped")


def ends_within(seconds: float, process: subprocess.Popen[str]) -> bool:
    """Whether a process ends within this time."""
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def exit_code_of_stop(run: SFTRun, condition: Callable[[], bool], *overrides: str) -> int:
    """Start the command, send SIGTERM to its launcher once a condition holds, and return the exit code."""
    with run.started(*overrides) as process:
        wait_until(condition, process)
        process.terminate()
        return end_of(process).returncode


def test_validation_interrupted_by_stop_is_repeated_on_resume(quickstart: Path, tmp_path: Path) -> None:
    run = SFTRun(quickstart, tmp_path, RARELY, "trainer.test_freq=2")
    # The training row of step 2 is written right before a validation of 50 micro-batches begins.
    slow_validation = ("data.micro_batch_size_per_gpu=1", "data.val_max_samples=-1")
    assert exit_code_of_stop(run, lambda: run.last_logged() >= 2, *slow_validation) == STOPPED_EXIT_CODE
    stopped_at = int(run.tracker())
    validated_before = {row["step"] for row in run.rows() if "val/loss" in row}
    run.finish(*slow_validation)
    validated = [row["step"] for row in run.rows() if "val/loss" in row]
    assert validated == [2, 4, 6], (stopped_at, validated_before)  # each once, at whatever moment the stop came
    assert stopped_at % 2 or "val/loss" in Manifest.read(tmp_path / f"global_step_{stopped_at}").metrics


def test_stop_before_first_step_saves_nothing(quickstart: Path, tmp_path: Path) -> None:
    run = SFTRun(quickstart, tmp_path, RARELY, "trainer.val_before_train=true")
    assert exit_code_of_stop(run, (tmp_path / "run.json").exists) == STOPPED_EXIT_CODE
    assert run.record()["status"] == "stopped"
    assert run.names() == set()


def test_checkpoint_is_saved_before_deadline(quickstart: Path, tmp_path: Path) -> None:
    run = SFTRun(quickstart, tmp_path, RARELY)
    # The cloud's deadline leaves time for some steps after the start. A machine so slow that it passes before the ranks
    # read it ignores it, and stops ahead of the recipe's deadline.
    deadline = time.time() + 15
    endless = ("trainer.total_training_steps=100000", "optim.total_training_steps=100", "trainer.total_epochs=100000")
    variable = {"MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP": str(deadline)}
    with run.started(*endless, f"trainer.preemption.deadline={deadline + 60}", **variable) as process:
        stopped = end_of(process)
    assert stopped.returncode == STOPPED_EXIT_CODE, stopped.stderr
    last = run.last_logged()
    assert last > 0
    assert run.names() == {str(last)}
    assert f"Stopped by the deadline after step {last}" in stopped.stdout
    times = [row["time"] for row in run.rows() if "train/loss" in row]
    if times[0] < deadline:  # the ranks have read it in time
        assert sum(moment > deadline for moment in times) <= 1, "steps began after the deadline"
