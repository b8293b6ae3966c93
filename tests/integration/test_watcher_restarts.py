"""The watcher beside a training: real processes of `python -m eval_pipeline watch`, killed, stopped and refused."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from omegaconf import DictConfig, OmegaConf

from tests.helpers import ROOT
from tests.helpers.commands import TIMEOUT_S
from verl_ext.launch.stop import StopSignals
from verl_ext.launch.watcher import RESTARTS, Watcher


@pytest.fixture
def config(quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    recipe = tmp_path / "few.yaml"
    recipe.write_text(
        f"datasets: {{few: {{format: quickstart, path: {quickstart}/problems.jsonl, limit: 4}}}}\n"
        "tiers: {tier1: [few]}\npoll_s: 0.2\nwandb: false\n"
    )
    (tmp_path / "run").mkdir()
    trainer = {"default_local_dir": str(tmp_path / "run"), "n_gpus_per_node": 2}
    return OmegaConf.create(
        {"trainer": trainer, "eval": {"watch": True, "recipe": str(recipe), "devices": None}},
    )


@pytest.fixture
def watcher(config: DictConfig) -> Iterator[Watcher]:
    watcher = Watcher(config, first_pause_s=0.05)
    yield watcher
    watcher.stop()
    assert of_run(config) == []


def test_one_that_is_killed_is_started_again_and_given_up_after_some_times(
    watcher: Watcher, config: DictConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    killed: set[int] = set()
    for _ in range(RESTARTS + 1):
        wait_for(lambda: any(process.pid not in killed for process in of_run(config)))
        (process,) = (process for process in of_run(config) if process.pid not in killed)
        killed.add(process.pid)
        process.kill()
    assert watcher.finish(StopSignals()) == 0
    told = capfd.readouterr().err.splitlines()
    assert len(told) == RESTARTS + 2
    for number in range(RESTARTS):
        assert f"was killed by signal 9; restart {number + 1} of {RESTARTS} in {0.05 * 2**number:g} s" in told[number]
    assert "the training goes on without it" in told[-2] and f"watch {config.trainer.default_local_dir}" in told[-2]
    assert told[-1].startswith("error: the evaluation was killed by signal 9; ")


def test_an_evaluated_checkpoint_gives_all_restarts_anew(
    watcher: Watcher, config: DictConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    killed: set[int] = set()
    for number in range(3):
        wait_for(lambda: any(process.pid not in killed for process in of_run(config)))
        (process,) = (process for process in of_run(config) if process.pid not in killed)
        figures = Path(config.trainer.default_local_dir) / f"eval/eval_step_{number}/metrics.json"
        figures.parent.mkdir()
        figures.touch()
        killed.add(process.pid)
        process.kill()
    wait_for(lambda: any(process.pid not in killed for process in of_run(config)))
    assert [line.partition("; ")[2][:16] for line in capfd.readouterr().err.splitlines()] == ["restart 1 of 3 i"] * 3


def test_one_that_refuses_its_input_is_not_started_again(config: DictConfig, capfd: pytest.CaptureFixture[str]) -> None:
    Path(config.eval.recipe).write_text("tiers: {tier1: [gone]}\n")  # after the training's start has checked it
    watcher = Watcher(config, first_pause_s=0.05)
    assert watcher.finish(StopSignals()) == 0
    watcher.stop()
    warning, error = capfd.readouterr().err.splitlines()
    assert "ended with exit code 2; the training goes on without it (error: tiers.tier1 names 'gone'" in warning
    assert error.startswith("error: the evaluation ended with exit code 2; ") and "watch.log" in error


def test_one_that_somebody_stops_stays_stopped(
    watcher: Watcher, config: DictConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    log = Path(config.trainer.default_local_dir) / "eval/watch.log"
    wait_for(lambda: "Watching" in log.read_text())
    of_run(config)[0].terminate()
    assert watcher.finish(StopSignals()) == 0
    assert "ended with exit code 75; the training goes on without it (Stopped by SIGTERM" in capfd.readouterr().err


def test_one_that_says_that_a_finished_run_failed_is_not_started_again(
    config: DictConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    run = {"status": "finished", "attempts": []}
    (Path(config.trainer.default_local_dir) / "run.json").write_text(json.dumps(run))
    watcher = Watcher(config, first_pause_s=0.05)
    assert watcher.finish(StopSignals()) == 0
    watcher.stop()
    (error,) = capfd.readouterr().err.splitlines()  # nothing was saved
    assert error.startswith("error: the evaluation ended with exit code 1; ")


def of_run(config: DictConfig) -> list[psutil.Process]:
    """Processes that watch the run, apart from those that have ended."""
    directory = os.fspath(config.trainer.default_local_dir)
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if {"watch", directory} <= set(process.info["cmdline"] or ())]


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)
