"""`run_sft.sh … eval.watch=true`: every checkpoint is evaluated beside the training that saves it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.commands import TIMEOUT_S, Run, end_of, wait_until


@pytest.fixture
def run(quickstart: Path, tmp_path: Path) -> Run:
    recipe = tmp_path / "few.yaml"
    recipe.write_text(
        f"datasets: {{few: {{format: quickstart, path: {quickstart}/problems.jsonl, limit: 4}}}}\n"
        "tiers: {tier1: [few]}\nsampling: {max_tokens: 16}\npoll_s: 0.5\nwandb: false\n"
    )
    return Run(quickstart, tmp_path / "run", "eval.watch=true", f"eval.recipe={recipe}", "trainer.max_ckpt_to_keep=9")


def test_a_run_ends_with_every_checkpoint_evaluated(run: Run) -> None:
    result = run.start()
    assert result.returncode == 0, result.stderr
    for step in (2, 4, 6):
        metrics = json.loads((run.run_dir / f"eval/eval_step_{step}/metrics.json").read_text())
        assert (metrics["step"], metrics["datasets"]["few"]["num_problems"]) == (step, 4)
    best = json.loads((run.run_dir / "best_checkpoint.json").read_text())
    assert [entry["step"] for entry in best["checkpoints"]] == [2, 4, 6]
    assert best["step"] in (2, 4, 6)

    written = (run.run_dir / "eval/eval_step_6/metrics.json").stat().st_mtime_ns
    again = run.start()  # finished, and nothing is left to evaluate
    assert again.returncode == 0 and "This run is finished" in again.stdout
    assert (run.run_dir / "eval/eval_step_6/metrics.json").stat().st_mtime_ns == written


def test_a_stop_ends_the_watcher_too_and_the_next_start_evaluates_the_rest(run: Run) -> None:
    with run.started(run.environment, "trainer.total_training_steps=400") as process:
        wait_until((run.run_dir / "global_step_2/manifest.json").exists, process)
        wait_until(lambda: bool(of_run(run)), process)
        process.terminate()
        result = end_of(process)
    assert result.returncode == 75, result.stderr
    assert not of_run(run)
    last = max(map(int, run.names())) + 1
    again = run.start(f"trainer.total_training_steps={last}")
    assert again.returncode == 0, again.stderr
    evaluated = {path.parent.name.removeprefix("eval_step_") for path in run.run_dir.glob("eval/*/metrics.json")}
    assert {"2", str(last)} <= evaluated == run.names()


def test_a_watcher_that_is_killed_beside_the_training_is_replaced(run: Run) -> None:
    with run.started(run.environment) as process:
        wait_until(lambda: bool(of_run(run)), process)
        of_run(run)[0].kill()
        result = end_of(process)
    assert result.returncode == 0, result.stderr
    assert "was killed by signal 9; restart 1 of 3 in 5 s" in result.stderr
    assert (run.run_dir / "eval/eval_step_6/metrics.json").exists()


def test_a_recipe_that_cannot_be_used_is_refused_before_anything_starts(run: Run) -> None:
    result = run.start("eval.recipe=quikstart")
    assert result.returncode == 2
    assert result.stderr.startswith("error: the evaluation beside the training (eval.watch=true) cannot start: ")
    assert result.stderr.count("\n") == 1 and "recipe=quickstart" in result.stderr
    assert not (run.run_dir / "run.json").exists()


def test_a_killed_launcher_leaves_no_watcher(run: Run) -> None:
    with run.started(run.environment) as process:
        wait_until(lambda: bool(of_run(run)), process)
        process.kill()
        process.wait()
        deadline = time.monotonic() + TIMEOUT_S
        while of_run(run) and time.monotonic() < deadline:
            time.sleep(0.2)
    assert not of_run(run)


def of_run(run: Run) -> list[psutil.Process]:
    """Processes that watch this run."""
    directory = os.fspath(run.run_dir.absolute())
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if {"watch", directory} <= set(process.info["cmdline"] or ())]
