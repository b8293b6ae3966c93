"""A watcher that is killed twenty times, stopped with its training, and disturbed by a second one."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers.commands import SFTRun, end_of
from tests.helpers.evaluation import evaluate, make_exports, started
from tests.helpers.processes import running, wait_until
from tests.helpers.watch import evaluated_run, kills_change_nothing


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has been trained to give three answers."""
    return make_exports(tmp_path_factory.mktemp("models"))[0]


def test_twenty_kills_change_no_result(export: Path, tmp_path: Path) -> None:
    phases = ["start"] * 6 + ["load"] * 4 + ["generate"] * 4 + ["judge"] * 5
    random.Random(20).shuffle(phases)
    kills_change_nothing(tmp_path, export, [*phases, "write"], num_problems=240, seed=20)


def test_stop_ends_watcher_and_restart_evaluates_the_rest(quickstart: Path, few_problems: Path, tmp_path: Path) -> None:
    watch = ("eval.watch=true", f"eval.recipe={few_problems}", "trainer.max_ckpt_to_keep=9")
    run = SFTRun(quickstart, tmp_path / "run", *watch)
    run.imports = "vllm"
    with run.started("trainer.total_training_steps=400") as process:
        wait_until((run.run_dir / "global_step_2/manifest.json").exists, process)
        wait_until(lambda: running("watch", str(run.run_dir)), process)
        process.terminate()
        result = end_of(process)
    assert result.returncode == 75, result.stderr
    assert not running("watch", str(run.run_dir))
    last = max(map(int, run.names())) + 1
    run.finish(f"trainer.total_training_steps={last}")
    evaluated = {path.parent.name.removeprefix("eval_step_") for path in run.run_dir.glob("eval/*/metrics.json")}
    assert {"2", str(last)} <= evaluated == run.names()


def test_two_watchers_with_different_settings_both_exit(export: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = evaluated_run(run_dir, export)
    logs = [tmp_path / f"{limit}.log" for limit in (7, 8)]
    with ExitStack() as stack:
        both = [
            stack.enter_context(started(log, "watch", run_dir, *options, f"judge.limits.cpu_s={log.stem}"))
            for log in logs
        ]
        wait_until(lambda: all(process.poll() is not None for process in both))
    texts = [log.read_text() for log in logs]
    assert [text.count("Evaluated: ") for text in texts] == [3, 3], texts
    assert any("with other settings; waiting for" in text for text in texts), texts
    metrics = [json.loads(path.read_text()) for path in run_dir.glob("eval/eval_step_*/metrics.json")]
    assert len({each["protocol"]["slow"]["limits"]["cpu_s"] for each in metrics}) == 1  # of the last watcher


def test_trial_with_limit_leaves_metrics_unchanged(export: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = evaluated_run(run_dir, export)
    metrics, best = run_dir / "eval/eval_step_30/metrics.json", run_dir / "best_checkpoint.json"
    before = metrics.read_bytes(), best.read_bytes()
    process = evaluate("run", "--checkpoint", run_dir / "global_step_30", "--limit", "1", *options)
    assert process.returncode == 0, process.stderr
    trial = json.loads((run_dir / "eval/trial_step_30/metrics.json").read_text())
    assert trial["datasets"]["slow"]["num_problems"] == 1
    assert (metrics.read_bytes(), best.read_bytes()) == before
