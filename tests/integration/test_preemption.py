"""A run that is asked to stop saves at the next step and goes on from there as if nothing had happened."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.helpers.commands import NUM_STEPS, TIMEOUT_S, Run, end_of, wait_until
from tests.helpers.processes import ranks_of
from verl_ext.errors import STOPPED_EXIT_CODE

RARELY = "trainer.save_freq=-1"


@pytest.fixture(scope="module")
def uninterrupted(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(quickstart, tmp_path_factory.mktemp("uninterrupted"), RARELY)
    assert run.start().returncode == 0
    return run


def last_logged(run: Run) -> int:
    """The last step that was logged, 0 before the first."""
    path = run.run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


@pytest.mark.parametrize(
    ("number", "receiver", "override"),
    [
        (signal.SIGTERM, "launcher", "trainer.checkpoint.async_save=false"),
        (signal.SIGINT, "launcher", "trainer.checkpoint.async_save=true"),
        (signal.SIGUSR1, "rank 1", "trainer.checkpoint.async_save=false"),
        (signal.SIGTERM, "rank 0", "trainer.checkpoint.async_save=false"),
    ],
)
def test_no_step_is_lost(
    number: signal.Signals, receiver: str, override: str, quickstart: Path, uninterrupted: Run, tmp_path: Path
) -> None:
    run = Run(quickstart, tmp_path, RARELY)
    with run.started(run.environment, override) as process:
        wait_until(lambda: last_logged(run) >= 2, process)
        launcher = psutil.Process(process.pid)
        target = launcher if receiver == "launcher" else ranks_of(process.pid)[int(receiver[-1])]
        target.send_signal(number)
        stopped = end_of(process)
    assert stopped.returncode == STOPPED_EXIT_CODE, stopped.stderr
    assert "Traceback" not in stopped.stdout + stopped.stderr
    record, last = json.loads((tmp_path / "run.json").read_text()), last_logged(run)
    assert record["status"] == "stopped"
    assert record["attempts"][0]["exit_reason"] == f"stopped by {number.name} after step {last}"
    assert run.names() == {str(last)}
    assert run.tracker() == str(last)
    assert f"Stopped by {number.name} after step {last}; the same command goes on from there." in stopped.stdout

    assert run.start(override).returncode == 0
    expected = uninterrupted.losses(1)
    assert run.losses(1) == {step: expected[step] for step in range(1, last + 1)}
    assert run.losses(2) == {step: expected[step] for step in range(last + 1, NUM_STEPS + 1)}


def stop_when(run: Run, is_so: Callable[[], bool], *overrides: str) -> int:
    """Start the command, send SIGTERM to its launcher as soon as something is so, and return the exit code."""
    with run.started(run.environment, *overrides) as process:
        wait_until(is_so, process)
        process.terminate()
        return end_of(process).returncode


def test_a_stop_during_validation_leaves_the_validation_to_the_next_start(quickstart: Path, tmp_path: Path) -> None:
    run = Run(quickstart, tmp_path, RARELY, "trainer.test_freq=2")
    # The training row of step 2 is written right before a validation of 50 micro-batches begins.
    slow_validation = ("data.micro_batch_size_per_gpu=1", "data.val_max_samples=-1")
    assert stop_when(run, lambda: last_logged(run) >= 2, *slow_validation) == STOPPED_EXIT_CODE
    stopped_at = int(run.tracker())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    validated_before = {row["step"] for row in rows if "val/loss" in row}
    assert run.start(*slow_validation).returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    validated = [row["step"] for row in rows if "val/loss" in row]
    assert validated == [2, 4, 6], (stopped_at, validated_before)  # each once, whenever the stop came


def test_a_stop_before_the_first_step_has_nothing_to_save(quickstart: Path, tmp_path: Path) -> None:
    run = Run(quickstart, tmp_path, RARELY, "trainer.val_before_train=true")
    has_ranks = (tmp_path / "run.json").exists
    assert stop_when(run, has_ranks) == STOPPED_EXIT_CODE
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "stopped"
    assert run.names() == set()


def test_a_deadline_is_met_with_a_checkpoint(quickstart: Path, tmp_path: Path) -> None:
    run = Run(quickstart, tmp_path, RARELY)
    # Shorter than the steps asked for need, longer than the start of the ranks: some steps, then the save.
    deadline = time.time() + 60
    overrides = ("trainer.total_training_steps=100000", "optim.total_training_steps=100", "trainer.total_epochs=100000")
    with run.started(
        {**run.environment, "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP": str(deadline)}, *overrides
    ) as process:
        code = process.wait(TIMEOUT_S)
        output, _ = process.communicate()
    assert code == STOPPED_EXIT_CODE
    last = last_logged(run)
    assert last > 0
    assert run.names() == {str(last)}
    assert f"Stopped by the deadline after step {last}; the same command goes on from there." in output
