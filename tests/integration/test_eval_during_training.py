"""`run_sft.sh … eval.watch=true`: every checkpoint is evaluated while the training that saves it continues."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.commands import SFTRun
from tests.helpers.processes import running, wait_gone, wait_until


def test_every_checkpoint_is_evaluated_despite_killed_watcher(watched_run: SFTRun) -> None:
    for step in (2, 4, 6):
        metrics = json.loads((watched_run.run_dir / f"eval/eval_step_{step}/metrics.json").read_text())
        assert (metrics["step"], metrics["datasets"]["few"]["num_problems"]) == (step, 4)
    best = json.loads((watched_run.run_dir / "best_checkpoint.json").read_text())
    assert [entry["step"] for entry in best["checkpoints"]] == [2, 4, 6]
    assert best["step"] in (2, 4, 6)
    output = watched_run.run_dir.with_suffix(".err").read_text()
    assert "was killed by signal 9" in output and "restart 1 of 3" in output


@pytest.fixture
def run(quickstart: Path, few_problems: Path, tmp_path: Path) -> SFTRun:
    """A run with the settings of `watched_run` that has not been started."""
    watch = ("eval.watch=true", f"eval.recipe={few_problems}", "trainer.max_ckpt_to_keep=9")
    run = SFTRun(quickstart, tmp_path / "run", *watch)
    run.imports = "vllm"
    return run


def test_restarted_finished_run_evaluates_nothing(run: SFTRun, watched_run: SFTRun) -> None:
    shutil.copytree(watched_run.run_dir, run.run_dir)
    metrics = {path: path.stat().st_mtime_ns for path in run.run_dir.glob("eval/eval_step_*/metrics.json")}
    run.finish()  # a new directory is a different run, which resumes at the last step
    again = run.finish()
    assert "This run is finished" in again.stdout and len(run.attempts()) == 2
    assert len(metrics) == 3 and {path: path.stat().st_mtime_ns for path in metrics} == metrics


def test_rejects_unknown_eval_recipe_before_start(run: SFTRun) -> None:
    refused = run.start("eval.recipe=quikstart")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1
    assert not (run.run_dir / "run.json").exists()


def test_killed_launcher_leaves_no_watcher(run: SFTRun) -> None:
    with run.started() as process:
        watchers = wait_until(lambda: running("watch", str(run.run_dir)), process)
        process.kill()
        process.wait()
        wait_gone(watchers)
    assert not running("watch", str(run.run_dir))
