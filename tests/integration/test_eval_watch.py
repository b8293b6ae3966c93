"""`watch` beside a run whose checkpoints come, go and are damaged, and an evaluation that is killed over and over."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.helpers.checkpoints import flip_byte
from tests.helpers.evaluation import (
    HEART,
    commit,
    evaluate,
    make_exports,
    read_lines,
    slow_problems,
    started,
    statuses,
    wait_until,
    write_recipe,
)
from tests.helpers.processes import alive, family_of, words_of
from verl_ext.checkpoint.lease import lease_holders
from verl_ext.checkpoint.retention import read_choice
from verl_ext.metrics.run_record import RunRecord

NUM_KILLS = 20
NUM_SLOW = 90
TIMES = {"avg_judge_time", "throughput", "cost_per_solved_judge_time"}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that has learnt three answers, and a random one."""
    return make_exports(tmp_path_factory.mktemp("models"))


def begin_run(run_dir: Path) -> RunRecord:
    record = RunRecord(run_dir)
    record.start_attempt(first_step=0, world_size=1, total_steps=30)
    return record


def finish_run(record: RunRecord) -> None:
    record.end_attempt("finished", 30, "all steps are done")


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a file that is being written."""
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def num_kept(run_dir: Path, label: str, kind: str) -> int:
    """Answers or verdicts on the disk."""
    return sum(len(whole_lines(path)) for path in run_dir.glob(f"eval/eval_{label}/work/*/{kind}-*.jsonl"))


@dataclass(frozen=True)
class Followed:
    """What came of two watchers on one run.

    Attributes:
        run_dir: of the run.
        codes: exit codes.
        logs: what each printed.
        leases: holders of step 10 while it was evaluated.
        jobs: rows of `status --json` after the end, by checkpoint and data set.
    """

    run_dir: Path
    codes: list[int]
    logs: list[str]
    leases: list[str]
    jobs: dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def followed(exports: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """Steps 10 and 20 are there, 15 is incomplete and 25 corrupt; 30 comes while they watch. Step 20 is the best."""
    learnt, random_one = exports
    root = tmp_path_factory.mktemp("followed")
    run_dir = root / "run"
    record = begin_run(run_dir)
    for step, export in ((10, random_one), (15, learnt), (20, learnt), (25, learnt)):
        commit(run_dir, step, export)
    (run_dir / "global_step_15" / "manifest.json").unlink()
    flip_byte(run_dir / "global_step_25" / "huggingface" / "model.safetensors")
    tiers = {"tier1": {"first": HEART}, "tier2": {"second": HEART[:1]}, "tier3": {"third": slow_problems(3, 0.1)}}
    recipe = write_recipe(root / "tiers.yaml", tiers, max_attempts=1)
    logs = [root / "first.log", root / "second.log"]
    words = ("watch", run_dir, "--recipe", recipe, "--no-wandb", "sampling.max_tokens=60")
    with ExitStack() as stack:
        first = stack.enter_context(started(logs[0], *words))
        # the second begins when the first has its hands full, so both have something to do
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
    wait_until(lambda: not alive(families))
    jobs = {(row["checkpoint"], row["dataset"]): row for row in statuses(run_dir)}
    return Followed(run_dir, codes, [log.read_text() for log in logs], leases, jobs)


def test_each_complete_checkpoint_is_evaluated_also_one_that_comes_later(followed: Followed) -> None:
    done = {key for key, row in followed.jobs.items() if row["state"] == "done"}
    assert {("step_10", "first"), ("step_20", "first"), ("step_30", "first")} <= done
    for step, rate in ((10, 0.0), (20, 0.25), (30, 0.0)):
        metrics = json.loads((followed.run_dir / "eval" / f"eval_step_{step}" / "metrics.json").read_text())
        assert metrics["datasets"]["first"]["accepted_at_1"] == rate


def test_every_fourth_has_the_second_tier_and_the_best_has_all(followed: Followed) -> None:
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
    for path in followed.run_dir.glob("eval/eval_*/work/*/*.jsonl"):
        keys = [row["problem_id"] for row in read_lines(path)]
        assert keys and len(set(keys)) == len(keys), path
    assert {row["attempts"] for key, row in followed.jobs.items() if key[0] != "step_25"} == {0}
    assert not any("Traceback" in log for log in followed.logs)


def test_an_incomplete_checkpoint_is_reported_once_and_left(followed: Followed) -> None:
    for log in followed.logs:
        assert log.count("global_step_15 is not evaluated: it has no manifest.json") == 1
    assert not (followed.run_dir / "eval" / "eval_step_15").exists()


def test_a_corrupt_export_is_reported_and_not_loaded(followed: Followed) -> None:
    assert followed.codes == [1, 1]
    row = followed.jobs["step_25", "first"]
    assert (row["state"], row["attempts"]) == ("failed", 1)
    assert "huggingface/model.safetensors has the digest" in row["error"]
    shown = evaluate("status", followed.run_dir)
    assert shown.returncode == 1 and row["error"] in shown.stdout
    assert not (followed.run_dir / "eval" / "eval_step_25").exists()


def test_the_best_is_named_for_rotation(followed: Followed) -> None:
    best = json.loads((followed.run_dir / "best_checkpoint.json").read_text())
    assert (best["step"], best["metric"], best["value"]) == (20, "exec_success_rate", 0.5)
    assert best["interval"][0] < 0.5 < best["interval"][1]
    assert [entry["step"] for entry in best["checkpoints"]] == [10, 20, 30]
    assert read_choice(followed.run_dir) == (followed.run_dir / "global_step_20", None)


def test_a_checkpoint_is_leased_while_it_is_evaluated(followed: Followed) -> None:
    assert len(followed.leases) == 1 and followed.leases[0].startswith("process ")
    assert list(followed.run_dir.glob("global_step_*/lease.*")) == []


def test_watching_an_evaluated_run_again_does_nothing(followed: Followed) -> None:
    before = {path: path.read_bytes() for path in followed.run_dir.rglob("*.json*")}
    recipe = followed.run_dir.parent / "tiers.yaml"
    process = evaluate("watch", followed.run_dir, "--recipe", recipe, "--no-wandb", "sampling.max_tokens=60")
    assert process.returncode == 1  # step 25 has failed, still
    assert "Evaluated: " not in process.stdout
    assert {path: path.read_bytes() for path in followed.run_dir.rglob("*.json*")} == before


@pytest.fixture
def copy(followed: Followed, tmp_path: Path) -> Path:
    """The evaluated run once more, to be evaluated otherwise: all answers are there, so no engine is needed."""
    return shutil.copytree(followed.run_dir, tmp_path / "run")


@pytest.fixture
def words(followed: Followed) -> tuple[str | Path, ...]:
    """As the run was watched."""
    return ("--recipe", followed.run_dir.parent / "tiers.yaml", "--no-wandb", "sampling.max_tokens=60")


def limit_of(run_dir: Path, step: int) -> float:
    metrics = json.loads((run_dir / "eval" / f"eval_step_{step}" / "metrics.json").read_text())
    return metrics["protocol"]["first"]["limits"]["cpu_s"]


def test_other_limits_judge_the_same_answers_anew(copy: Path, words: tuple[str | Path, ...]) -> None:
    trial = evaluate("run", "--checkpoint", copy / "global_step_10", *words, "judge.limits.cpu_s=6")
    assert trial.returncode == 0, trial.stderr
    assert (limit_of(copy, 10), limit_of(copy, 20)) == (6, 5)
    best = json.loads((copy / "best_checkpoint.json").read_text())
    assert best["settings"]["first"]["limits"]["cpu_s"] == 5  # one checkpoint that was tried otherwise decides nothing
    assert [(entry["step"], entry["value"]) for entry in best["checkpoints"]] == [(10, None), (20, 0.5), (30, 0.0)]
    watched = evaluate("watch", copy, *words, "judge.limits.cpu_s=6")
    assert watched.returncode == 1 and "Traceback" not in watched.stderr, watched.stderr  # step 25 is corrupt
    assert [limit_of(copy, step) for step in (10, 20, 30)] == [6, 6, 6]
    best = json.loads((copy / "best_checkpoint.json").read_text())
    assert (best["settings"]["first"]["limits"]["cpu_s"], best["step"], best["value"]) == (6, 20, 0.5)


def test_two_watchers_with_different_settings_both_end(copy: Path, words: tuple[str | Path, ...]) -> None:
    logs = [copy.parent / f"{limit}.log" for limit in (7, 8)]
    with ExitStack() as stack:
        both = [
            stack.enter_context(started(log, "watch", copy, *words, f"judge.limits.cpu_s={log.stem}")) for log in logs
        ]
        wait_until(lambda: all(process.poll() is not None for process in both))
    texts = [log.read_text() for log in logs]
    assert [text.count("Evaluated: ") for text in texts] == [4, 4], texts  # the best has a third tier
    assert any("with other settings; waiting for" in text for text in texts), texts
    assert len({limit_of(copy, step) for step in (10, 20, 30)}) == 1  # those of who came last


def test_what_another_recipe_leaves_out_stays(copy: Path, words: tuple[str | Path, ...], tmp_path: Path) -> None:
    before = (copy / "eval" / "eval_step_20" / "metrics.json").read_bytes()
    recipe = yaml.safe_load(Path(words[1]).read_text())
    recipe["datasets"] = {"second": recipe["datasets"]["second"]}
    recipe["tiers"] = {"tier1": ["second"]}
    (tmp_path / "second.yaml").write_text(yaml.safe_dump(recipe))
    again = evaluate("run", "--checkpoint", copy / "global_step_20", "--recipe", tmp_path / "second.yaml", *words[2:])
    assert again.returncode == 0 and "Evaluated already: " in again.stdout, again.stdout + again.stderr
    assert (copy / "eval" / "eval_step_20" / "metrics.json").read_bytes() == before


def test_figures_of_a_checkpoint_that_was_trained_again_do_not_count(
    copy: Path, words: tuple[str | Path, ...], exports: tuple[Path, Path]
) -> None:
    shutil.rmtree(copy / "global_step_20")
    flip_byte(commit(copy, 20, exports[1]) / "huggingface" / "model.safetensors")
    watched = evaluate("watch", copy, *words)
    assert watched.returncode == 1 and "step_20 has other weights than its figures" in watched.stderr, watched.stderr
    assert "Traceback" not in watched.stderr
    assert not (copy / "eval" / "eval_step_20" / "metrics.json").exists()
    states = {row["dataset"]: row["state"] for row in statuses(copy) if row["checkpoint"] == "step_20"}
    assert states["first"] == "failed"


def test_a_damaged_file_of_figures_is_written_again(copy: Path, words: tuple[str | Path, ...]) -> None:
    path = copy / "eval" / "eval_step_10" / "metrics.json"
    before = path.read_bytes()
    path.write_bytes(before[:100])
    watched = evaluate("watch", copy, *words)
    assert "cannot read the figures" in watched.stderr and "Traceback" not in watched.stderr, watched.stderr
    assert path.read_bytes() == before


def test_a_run_without_a_checkpoint_is_told_so(tmp_path: Path, words: tuple[str | Path, ...]) -> None:
    finish_run(begin_run(tmp_path / "run"))
    watched = evaluate("watch", tmp_path / "run", *words)
    assert watched.returncode == 1 and "without a checkpoint that can be evaluated" in watched.stderr


def test_it_says_what_it_waits_for(tmp_path: Path, words: tuple[str | Path, ...]) -> None:
    (tmp_path / "run").mkdir()
    log = tmp_path / "log"
    with started(log, "watch", tmp_path / "run", *words):
        wait_until(lambda: "nobody has started the run" in log.read_text())
        record = begin_run(tmp_path / "run")
        record.end_attempt("failed", 3, "a rank died")
        wait_until(lambda: "the run has failed; waiting" in log.read_text())


@dataclass
class Killing:
    """A watcher that is started and killed again and again over one evaluation."""

    run_dir: Path
    words: tuple[str | Path, ...]
    log: Path
    dice: random.Random

    def kill_at(self, phase: str) -> str:
        """Start it, kill it somewhere in a phase, and wait until all it started has ended; returns where that was."""
        families: dict[int, psutil.Process] = {}
        before = self._progress()
        with started(self.log, *self.words) as process:
            begun = time.monotonic()

            def watched(condition: Callable[[], bool]) -> bool:
                families.update((child.pid, child) for child in family_of(process))
                assert process.poll() is None, f"it ended by itself: {self.log.read_text()[-2000:]}"
                return condition()

            wait_until(lambda: watched(lambda: self._has_come_to(phase, process, before)), pause_s=0.002)
            pause = time.monotonic() + self.dice.uniform(0, {"start": 1.5, "load": 6.0, "write": 0.02}.get(phase, 0.4))
            while time.monotonic() < pause and process.poll() is None:
                families.update((child.pid, child) for child in family_of(process))
                time.sleep(0.01)
            families.update((child.pid, child) for child in family_of(process))
            process.kill()
            process.wait()
            killed = time.monotonic()
        wait_until(lambda: not alive(families.values()))
        answers, verdicts = self._progress()
        ended = time.monotonic()
        return (
            f"{phase:8} after {killed - begun:5.1f} s with {len(families):2} processes, all gone "
            f"{ended - killed:4.1f} s later; {answers:2} answers, {verdicts:2} verdicts, {self._files()}"
        )

    def _has_come_to(self, phase: str, process: psutil.Process, before: tuple[int, int]) -> bool:
        answers, verdicts = self._progress()
        if phase == "load":
            return any("vllm_process" in " ".join(words_of(child)) for child in family_of(process))
        if phase == "generate":
            return answers > before[0] or answers == NUM_SLOW
        if phase == "judge":
            return verdicts > before[1] or verdicts == NUM_SLOW
        if phase == "write":
            return self._files() != "nothing written" or verdicts == NUM_SLOW
        return True

    def _progress(self) -> tuple[int, int]:
        return num_kept(self.run_dir, "step_10", "answers"), num_kept(self.run_dir, "step_10", "verdicts")

    def _files(self) -> str:
        directory = self.run_dir / "eval" / "eval_step_10"
        names = ("verdicts/slow.jsonl", "work/slow/result.json", "metrics.json")
        return ", ".join(name for name in names if (directory / name).exists()) or "nothing written"


@pytest.fixture(scope="module")
def slow_run(exports: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A finished run with one checkpoint, and a recipe of many problems in small batches."""
    root = tmp_path_factory.mktemp("slow")
    record = begin_run(root / "run")
    commit(root / "run", 10, exports[0])
    finish_run(record)
    tiers = {"tier1": {"slow": slow_problems(NUM_SLOW, 0.2)}}
    yield root / "run", write_recipe(root / "slow.yaml", tiers, batch_size=4)


def results_of(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """Figures without times, rows of answers by problem, and the error types of the verdicts."""
    directory = run_dir / "eval" / "eval_step_10"
    metrics = json.loads((directory / "metrics.json").read_text())
    figures = {name: value for name, value in metrics["datasets"]["slow"].items() if name not in TIMES}
    rest = {key: metrics[key] for key in ("label", "step", "tier", "protocol", "isolation")}
    (answers,), (verdicts,) = (list(directory.glob(f"work/slow/{kind}-*.jsonl")) for kind in ("answers", "verdicts"))
    kinds = {row["problem_id"]: row["error_type"] for row in read_lines(verdicts)}
    assert len(read_lines(verdicts)) == len(kinds) == NUM_SLOW, "something was judged twice"
    rows = {row["problem_id"]: row for row in read_lines(answers)}
    assert len(read_lines(answers)) == len(rows) == NUM_SLOW, "something was answered twice"
    return {**figures, **rest}, rows, kinds


def test_twenty_kills_change_nothing(slow_run: tuple[Path, Path], tmp_path: Path) -> None:
    run_dir, recipe = slow_run
    undisturbed = shutil.copytree(run_dir, tmp_path / "undisturbed")
    dice = random.Random(20)
    phases = ["start"] * 6 + ["load"] * 4 + ["generate"] * 4 + ["judge"] * 5
    dice.shuffle(phases)
    killing = Killing(run_dir, ("watch", run_dir, "--recipe", recipe, "--no-wandb"), tmp_path / "killed.log", dice)
    assert len(phases) == NUM_KILLS - 1
    for number, phase in enumerate([*phases, "write"], start=1):
        print(f"kill {number:2}: {killing.kill_at(phase)}", flush=True)
    last = evaluate("watch", run_dir, "--recipe", recipe, "--no-wandb")
    assert last.returncode == 0, last.stderr
    calm = evaluate("watch", undisturbed, "--recipe", recipe, "--no-wandb")
    assert calm.returncode == 0, calm.stderr
    expected, expected_answers, expected_kinds = results_of(undisturbed)
    figures, answers, kinds = results_of(run_dir)
    assert (answers, kinds) == (expected_answers, expected_kinds)
    assert figures == expected and figures["accepted_at_1"] == 1.0
    (row,) = statuses(run_dir)
    assert (row["state"], row["attempts"]) == ("done", 0)
