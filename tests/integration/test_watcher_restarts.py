"""The watcher of a training run: real processes of `python -m eval_pipeline watch`, killed, stopped and rejected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers import ROOT
from tests.helpers.processes import running, wait_until
from verl_ext.launch.watcher import RESTARTS, EvalWatcher
from verl_ext.processes import StopSignals
from verl_ext.trainer.config import SFTTrainerConfig, WatchConfig
from verl_ext.trainer.stages import SFTConfig


@pytest.fixture
def config(quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SFTConfig:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("verl_ext.launch.outcome.FIRST_PAUSE_S", 0.05)
    recipe = tmp_path / "few.yaml"
    recipe.write_text(
        f"datasets: {{few: {{format: quickstart, path: {quickstart}/problems.jsonl, limit: 4}}}}\n"
        "tiers: {tier1: [few]}\npoll_s: 0.2\nwandb: false\n"
    )
    (tmp_path / "run").mkdir()
    return SFTConfig(
        trainer=SFTTrainerConfig(default_local_dir=str(tmp_path / "run"), n_gpus_per_node=2),
        eval=WatchConfig(watch=True, recipe=str(recipe)),
    )


def watchers_of(config: SFTConfig) -> list[psutil.Process]:
    return running("watch", config.trainer.default_local_dir)


def next_watcher(config: SFTConfig, killed: set[int]) -> psutil.Process:
    """Wait for a watcher other than the killed ones."""
    return wait_until(lambda: [each for each in watchers_of(config) if each.pid not in killed])[0]


@pytest.fixture
def watcher(config: SFTConfig) -> Iterator[EvalWatcher]:
    watcher = EvalWatcher(config)
    yield watcher
    watcher.stop(StopSignals())
    assert watchers_of(config) == []


def test_killed_watcher_is_restarted_a_limited_number_of_times(
    watcher: EvalWatcher, config: SFTConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    killed: set[int] = set()
    for _ in range(RESTARTS + 1):
        process = next_watcher(config, killed)
        killed.add(process.pid)
        process.kill()
    assert watcher.finish(StopSignals()) == 0
    *restarts, warning, error = capfd.readouterr().err.splitlines()
    assert len(restarts) == RESTARTS and all("was killed by signal 9" in line for line in [*restarts, warning, error])
    for number, line in enumerate(restarts):
        assert f"restart {number + 1} of {RESTARTS} in {0.05 * 2**number:g} s" in line
    assert warning.startswith("warning: ") and f"watch {config.trainer.default_local_dir}" in warning
    assert error.startswith("error: ")


def test_new_evaluation_resets_restart_count(
    watcher: EvalWatcher, config: SFTConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    killed: set[int] = set()
    for number in range(3):
        process = next_watcher(config, killed)
        path = Path(config.trainer.default_local_dir) / f"eval/eval_step_{number}/metrics.json"
        path.parent.mkdir()
        path.touch()
        killed.add(process.pid)
        process.kill()
    next_watcher(config, killed)
    assert capfd.readouterr().err.count(f"restart 1 of {RESTARTS} ") == 3


def test_watcher_rejecting_its_input_is_not_restarted(config: SFTConfig, capfd: pytest.CaptureFixture[str]) -> None:
    Path(config.eval.recipe).write_text("tiers: {tier1: [gone]}\n")  # after the launcher has checked it
    watcher = EvalWatcher(config)
    assert watcher.finish(StopSignals()) == 0
    watcher.stop(StopSignals())
    warning, error = capfd.readouterr().err.splitlines()
    assert "ended with exit code 2" in warning and "tiers.tier1" in warning and "'gone'" in warning
    assert error.startswith("error: ") and "ended with exit code 2" in error and "watch.log" in error


def test_stopped_watcher_is_not_restarted(
    watcher: EvalWatcher, config: SFTConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    log = Path(config.trainer.default_local_dir) / "eval/watch.log"
    wait_until(lambda: "Watching" in log.read_text())
    next_watcher(config, set()).terminate()
    assert watcher.finish(StopSignals()) == 0
    output = capfd.readouterr().err
    assert "ended with exit code 75" in output and "Stopped by SIGTERM" in output and "restart" not in output


def test_watcher_failing_after_run_ended_is_not_restarted(config: SFTConfig, capfd: pytest.CaptureFixture[str]) -> None:
    run = {"status": "finished", "attempts": []}
    (Path(config.trainer.default_local_dir) / "run.json").write_text(json.dumps(run))
    watcher = EvalWatcher(config)
    assert watcher.finish(StopSignals()) == 0
    watcher.stop(StopSignals())
    (error,) = capfd.readouterr().err.splitlines()  # nothing was saved
    assert error.startswith("error: ") and "ended with exit code 1" in error
