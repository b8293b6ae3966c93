"""`watch` on a run whose checkpoints appear, vanish and are damaged, and a watcher that is killed."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.evaluation import (
    HEART,
    evaluate,
    jobs,
    make_exports,
    read_lines,
    slow_problems,
    started,
    statuses,
    write_recipe,
)
from tests.helpers.processes import family_of, wait_gone, wait_until
from tests.helpers.watch import begin_run, finish_run, kills_change_nothing
from verl_ext.checkpoint.lease import lease_holders
from verl_ext.checkpoint.retention import read_best_file


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that has been trained to give three answers, and one with random weights."""
    return make_exports(tmp_path_factory.mktemp("models"))


@dataclass(frozen=True)
class Followed:
    """The outcome of two watchers on one run.

    Attributes:
        run_dir: of the run.
        codes: exit codes.
        logs: output of each.
        leases: holders of step 10 while it was evaluated.
        jobs: rows of `status --json` after the end, by checkpoint and dataset.
    """

    run_dir: Path
    codes: list[int]
    logs: list[str]
    leases: list[str]
    jobs: dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def followed(exports: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """Steps 10 and 20 exist, 15 is incomplete and 25 corrupt; 30 is saved while they watch. Step 20 is the best."""
    from tests.helpers.checkpoints import commit, flip_byte

    learned, random_one = exports
    root = tmp_path_factory.mktemp("followed")
    run_dir = root / "run"
    record = begin_run(run_dir)
    for step, export in ((10, random_one), (15, learned), (20, learned), (25, learned)):
        commit(run_dir, step, export)
    (run_dir / "global_step_15" / "manifest.json").unlink()
    flip_byte(run_dir / "global_step_25" / "huggingface" / "model.safetensors")
    tiers = {"tier1": {"first": HEART}, "tier2": {"second": HEART[:1]}, "tier3": {"third": slow_problems(3, 0.1)}}
    recipe = write_recipe(root / "tiers.yaml", tiers, max_attempts=1)
    logs = [root / "first.log", root / "second.log"]
    words = ("watch", run_dir, "--recipe", recipe, "--no-wandb", "sampling.max_tokens=60")
    with ExitStack() as stack:
        first = stack.enter_context(started(logs[0], *words))
        # the second starts while the first evaluates, so that both have work
        wait_until(lambda: (run_dir / "eval" / "ledger.sqlite").exists() and lease_holders(run_dir / "global_step_10"))
        second = stack.enter_context(started(logs[1], *words))
        leases = wait_until(lambda: lease_holders(run_dir / "global_step_10"))
        wait_until(lambda: (run_dir / "eval" / "eval_step_10" / "metrics.json").exists())
        commit(run_dir, 30, random_one)
        wait_until(lambda: (run_dir / "eval" / "eval_step_30" / "metrics.json").exists())
        assert first.poll() is second.poll() is None, "a watcher ended before the run did"
        finish_run(record)
        families = family_of(first) + family_of(second)
        codes = [first.wait(), second.wait()]
    wait_gone(families)
    jobs = {(row["checkpoint"], row["dataset"]): row for row in statuses(run_dir)}
    return Followed(run_dir, codes, [log.read_text() for log in logs], leases, jobs)


def test_every_complete_checkpoint_is_evaluated(followed: Followed) -> None:
    done = {key for key, row in followed.jobs.items() if row["state"] == "done"}
    assert {("step_10", "first"), ("step_20", "first"), ("step_30", "first")} <= done
    for step, rate in ((10, 0.0), (20, 0.25), (30, 0.0)):
        metrics = json.loads((followed.run_dir / "eval" / f"eval_step_{step}" / "metrics.json").read_text())
        assert metrics["datasets"]["first"]["accepted_at_1"] == rate


def test_every_fourth_gets_second_tier_and_best_gets_all(followed: Followed) -> None:
    assert set(followed.jobs) == {
        ("step_10", "first"), ("step_20", "first"), ("step_25", "first"), ("step_30", "first"),
        ("step_30", "second"), ("step_20", "second"), ("step_20", "third"),
    }  # fmt: skip
    assert {key: row["tier"] for key, row in followed.jobs.items() if row["tier"] != 1} == {
        ("step_30", "second"): 2, ("step_20", "second"): 2, ("step_20", "third"): 3,
    }  # fmt: skip
    metrics = json.loads((followed.run_dir / "eval" / "eval_step_20" / "metrics.json").read_text())
    assert metrics["datasets"].keys() == {"first", "second", "third"}
    assert metrics["datasets"]["third"]["accepted_at_1"] == 1.0


def test_two_watchers_do_each_job_once(followed: Followed) -> None:
    names = sorted(name for log in followed.logs for name in re.findall(r"^Evaluated: (.*)$", log, re.MULTILINE))
    assert names == ["step_10", "step_20", "step_20", "step_30"]  # 20 again with its third tier
    assert all("\n  best checkpoint global_step_20, by " in log for log in followed.logs)
    stored = [*followed.run_dir.glob("eval/eval_*/work/*/*.jsonl")]
    assert stored
    for path in stored:
        # failed answers and verdicts are retried once
        rows = [row for row in read_lines(path) if not row.get("error", row.get("error_type") == "api_error")]
        keys = [row["problem_id"] for row in rows]
        assert keys and len(set(keys)) == len(keys), path
    assert {row["attempts"] for key, row in followed.jobs.items() if key[0] != "step_25"} == {0}
    assert not any("Traceback" in log for log in followed.logs)


def test_incomplete_checkpoint_is_reported_once_and_skipped(followed: Followed) -> None:
    for log in followed.logs:
        [line] = [line for line in log.splitlines() if "global_step_15" in line]
        assert "manifest.json" in line
    assert not (followed.run_dir / "eval" / "eval_step_15").exists()


def test_corrupt_export_is_reported_and_not_loaded(followed: Followed) -> None:
    assert followed.codes == [1, 1]
    row = followed.jobs["step_25", "first"]
    assert (row["state"], row["attempts"]) == ("failed", 1)
    assert "huggingface/model.safetensors has the digest" in row["error"]
    shown = evaluate("status", followed.run_dir)
    assert shown.returncode == 1 and row["error"] in shown.stdout
    assert not (followed.run_dir / "eval" / "eval_step_25").exists()


def test_best_checkpoint_is_recorded_for_rotation(followed: Followed) -> None:
    best = json.loads((followed.run_dir / "best_checkpoint.json").read_text())
    assert (best["step"], best["metric"], best["value"]) == (20, "exec_success_rate", 0.5)
    assert best["interval"][0] < 0.5 < best["interval"][1]
    assert [entry["step"] for entry in best["checkpoints"]] == [10, 20, 30]
    assert read_best_file(followed.run_dir) == (followed.run_dir / "global_step_20", None)


def test_checkpoint_is_leased_while_evaluated(followed: Followed) -> None:
    assert len(followed.leases) == 1 and followed.leases[0].startswith("process ")
    assert list(followed.run_dir.glob("global_step_*/lease.*")) == []


def test_watching_an_evaluated_run_again_does_nothing(followed: Followed) -> None:
    before = {path: path.read_bytes() for path in followed.run_dir.rglob("*.json*")}
    recipe = followed.run_dir.parent / "tiers.yaml"
    process = evaluate("watch", followed.run_dir, "--recipe", recipe, "--no-wandb", "sampling.max_tokens=60")
    assert process.returncode == 1  # step 25 has failed
    assert "Evaluated: " not in process.stdout
    assert re.search(r"^  failed +\d+ of \d+ evaluations: step_25 on \w+", process.stdout, re.MULTILINE)
    assert f"Next: bash eval_pipeline/run.sh status {followed.run_dir}\n" in process.stdout
    assert {path: path.read_bytes() for path in followed.run_dir.rglob("*.json*")} == before


@pytest.fixture
def copy(followed: Followed, tmp_path: Path) -> Path:
    """A copy of the evaluated run for evaluation with other settings; it has all answers, so no engine is needed."""
    return shutil.copytree(followed.run_dir, tmp_path / "run")


@pytest.fixture
def words(followed: Followed) -> tuple[str | Path, ...]:
    """The options with which the run was watched."""
    return ("--recipe", followed.run_dir.parent / "tiers.yaml", "--no-wandb", "sampling.max_tokens=60")


def limit_of(run_dir: Path, step: int) -> float:
    metrics = json.loads((run_dir / "eval" / f"eval_step_{step}" / "metrics.json").read_text())
    return metrics["protocol"]["first"]["limits"]["cpu_s"]


def test_new_limits_rejudge_existing_answers(copy: Path, words: tuple[str | Path, ...]) -> None:
    trial = evaluate("run", "--checkpoint", copy / "global_step_10", *words, "judge.limits.cpu_s=6")
    assert trial.returncode == 0, trial.stderr
    assert (limit_of(copy, 10), limit_of(copy, 20)) == (6, 5)
    best = json.loads((copy / "best_checkpoint.json").read_text())
    assert best["settings"]["first"]["limits"]["cpu_s"] == 5  # a trial of one checkpoint decides nothing
    assert [(entry["step"], entry["value"]) for entry in best["checkpoints"]] == [(10, None), (20, 0.5), (30, 0.0)]
    watched = evaluate("watch", copy, *words, "judge.limits.cpu_s=6")
    assert watched.returncode == 1 and "Traceback" not in watched.stderr, watched.stderr  # step 25 is corrupt
    assert [limit_of(copy, step) for step in (10, 20, 30)] == [6, 6, 6]
    best = json.loads((copy / "best_checkpoint.json").read_text())
    assert (best["settings"]["first"]["limits"]["cpu_s"], best["step"], best["value"]) == (6, 20, 0.5)


def test_metrics_missing_from_another_recipe_are_kept(
    copy: Path, words: tuple[str | Path, ...], tmp_path: Path
) -> None:
    before = (copy / "eval" / "eval_step_20" / "metrics.json").read_bytes()
    recipe = yaml.safe_load(Path(words[1]).read_text())
    recipe["datasets"] = {"second": recipe["datasets"]["second"]}
    recipe["tiers"] = {"tier1": ["second"]}
    (tmp_path / "second.yaml").write_text(yaml.safe_dump(recipe))
    again = evaluate("run", "--checkpoint", copy / "global_step_20", "--recipe", tmp_path / "second.yaml", *words[2:])
    assert again.returncode == 0 and "Already evaluated: " in again.stdout, again.stdout + again.stderr
    assert (copy / "eval" / "eval_step_20" / "metrics.json").read_bytes() == before


def test_rejects_metrics_of_other_weights_at_same_step(
    copy: Path, words: tuple[str | Path, ...], exports: tuple[Path, Path]
) -> None:
    from tests.helpers.checkpoints import commit, flip_byte

    shutil.rmtree(copy / "global_step_20")
    flip_byte(commit(copy, 20, exports[1]) / "huggingface" / "model.safetensors")
    watched = evaluate("watch", copy, *words)
    assert watched.returncode == 1 and "the weights of step_20 have changed" in watched.stderr, watched.stderr
    assert "Traceback" not in watched.stderr
    assert not (copy / "eval" / "eval_step_20" / "metrics.json").exists()
    states = {job.dataset: job.state for job in jobs(copy) if job.checkpoint == "step_20"}
    assert states["first"] == "failed"


def test_damaged_metrics_file_is_rewritten(copy: Path, words: tuple[str | Path, ...]) -> None:
    path = copy / "eval" / "eval_step_10" / "metrics.json"
    before = path.read_bytes()
    path.write_bytes(before[:100])
    watched = evaluate("watch", copy, *words)
    assert str(path.parent) in watched.stderr and "Traceback" not in watched.stderr, watched.stderr
    assert path.read_bytes() == before


def test_finished_run_without_checkpoint_is_an_error(tmp_path: Path, words: tuple[str | Path, ...]) -> None:
    finish_run(begin_run(tmp_path / "run"))
    watched = evaluate("watch", tmp_path / "run", *words)
    assert watched.returncode == 1 and "without a checkpoint" in watched.stderr


def test_watch_reports_what_it_waits_for(tmp_path: Path, words: tuple[str | Path, ...]) -> None:
    (tmp_path / "run").mkdir()
    log = tmp_path / "log"
    with started(log, "watch", tmp_path / "run", *words):
        wait_until(lambda: "has not been started yet" in log.read_text())
        record = begin_run(tmp_path / "run")
        record.end_attempt("failed", 3, "a rank died")
        wait_until(lambda: "the run has failed; waiting" in log.read_text())


def test_kills_change_no_result(exports: tuple[Path, Path], tmp_path: Path) -> None:
    kills_change_nothing(tmp_path, exports[0], ["load", "generate", "judge"], num_problems=40, seed=20)
