"""Runs without a trainer for `watch`, and a watcher that is killed repeatedly."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.evaluation import (
    evaluate,
    jobs,
    num_kept,
    read_lines,
    slow_problems,
    started,
    write_recipe,
)
from tests.helpers.judge import killing_judges
from tests.helpers.processes import family_of, wait_gone, wait_until, words_of
from verl_ext.metrics.run_record import RunRecord

TIMES = {"avg_judge_time", "throughput", "cost_per_solved_judge_time"}
PAUSES = {"start": 1.5, "load": 1.0, "generate": 0.4, "judge": 0.4, "write": 0.02}
"""A kill falls at most this many seconds after the beginning of its phase."""


def begin_run(run_dir: Path) -> RunRecord:
    """Write the `run.json` of a run that is training."""
    record = RunRecord(run_dir)
    record.start_attempt(first_step=0, world_size=1, total_steps=30)
    return record


def finish_run(record: RunRecord) -> None:
    """Record the end of a run."""
    record.end_attempt("finished", 30, "all steps completed")


def evaluated_run(run_dir: Path, export: Path) -> tuple[str | Path, ...]:
    """Evaluate a finished run with checkpoints 10, 20 and 30 of the same model on eight problems.

    Args:
        run_dir: is created; the recipe is written to its parent directory.
        export: the model, which solves the problems.

    Returns:
        The options of the evaluation.
    """
    from tests.helpers.checkpoints import commit

    record = begin_run(run_dir)
    for step in (10, 20, 30):
        commit(run_dir, step, export)
    finish_run(record)
    recipe = write_recipe(run_dir.parent / "slow.yaml", {"tier1": {"slow": slow_problems(8, 0.5)}})
    options = ("--recipe", recipe, "--no-wandb")
    process = evaluate("watch", run_dir, *options)
    assert process.returncode == 0, process.stderr
    return options


@dataclass
class WatcherKiller:
    """Starts and kills a watcher repeatedly during one evaluation.

    Attributes:
        run_dir: run directory; its only checkpoint is step 10.
        num_problems: number of problems in the recipe.
        words: arguments of the command.
        log: file for the output.
        rng: chooses the time of the kill within a phase.
    """

    run_dir: Path
    num_problems: int
    words: tuple[str | Path, ...]
    log: Path
    rng: random.Random

    def kill_at(self, phase: str) -> str:
        """Start it, kill it in a phase, and wait until everything that it started has ended.

        Args:
            phase: `start`, `load`, `generate`, `judge` or `write`.

        Returns:
            A description of when it was killed.
        """
        families: dict[int, psutil.Process] = {}
        before = self.progress()
        with started(self.log, *self.words) as process:
            begun = time.monotonic()

            def has_ended() -> bool:
                families.update((child.pid, child) for child in family_of(process))
                return process.poll() is not None

            def has_come() -> bool:
                assert not has_ended(), f"it ended by itself: {self.log.read_text()[-2000:]}"
                return self.has_come_to(phase, process, before)

            wait_until(has_come, pause_s=0.002)
            pause = time.monotonic() + self.rng.uniform(0, PAUSES[phase])
            wait_until(lambda: has_ended() or time.monotonic() >= pause, pause_s=0.01)
            process.kill()
            process.wait()
            killed = time.monotonic()
        wait_gone(families.values())
        answers, verdicts = self.progress()
        return (
            f"{phase:8} after {killed - begun:5.1f} s with {len(families):2} processes, all gone "
            f"{time.monotonic() - killed:4.1f} s later; {answers:2} answers, {verdicts:2} verdicts, {self.files()}"
        )

    def has_come_to(self, phase: str, process: subprocess.Popen[bytes], before: tuple[int, int]) -> bool:
        """Whether the evaluation is in a phase."""
        answers, verdicts = self.progress()
        if phase == "load":
            return any("vllm_process" in " ".join(words_of(child)) for child in family_of(process))
        if phase == "generate":
            return answers > before[0] or answers == self.num_problems
        if phase == "judge":
            return verdicts > before[1] or verdicts == self.num_problems
        if phase == "write":
            return bool(self.files()) or verdicts == self.num_problems
        return True

    def progress(self) -> tuple[int, int]:
        """Number of answers and of verdicts on disk."""
        return num_kept(self.run_dir / "eval", "answers"), num_kept(self.run_dir / "eval", "verdicts")

    def files(self) -> list[str]:
        """The files that are written after the last verdict and exist."""
        directory = self.run_dir / "eval" / "eval_step_10"
        names = ("verdicts/slow.jsonl", "work/slow/result.json", "metrics.json")
        return [name for name in names if (directory / name).exists()]


def kills_change_nothing(directory: Path, export: Path, phases: Sequence[str], num_problems: int, seed: int) -> None:
    """Kill a watcher once in each of these phases, and the judge server of the last one several times.

    In the end the results equal those of an undisturbed evaluation.

    Args:
        directory: an empty one.
        export: the model, which solves the problems.
        phases: arguments of `WatcherKiller.kill_at`.
        num_problems: evaluated in batches of 4.
        seed: decides when it is killed within a phase.
    """
    from tests.helpers.checkpoints import commit

    run_dir = directory / "run"
    record = begin_run(run_dir)
    commit(run_dir, 10, export)
    finish_run(record)
    tiers = {"tier1": {"slow": slow_problems(num_problems, 0.2)}}
    judge = {"limits": {"cpu_s": 5.0}, "num_workers": 2}  # more would finish before the last kill
    options = ("--recipe", write_recipe(directory / "slow.yaml", tiers, batch_size=4, judge=judge), "--no-wandb")
    undisturbed = Path(shutil.copytree(run_dir, directory / "undisturbed"))
    words = ("watch", run_dir, *options)
    killing = WatcherKiller(run_dir, num_problems, words, directory / "killed.log", random.Random(seed))
    for number, phase in enumerate(phases, start=1):
        print(f"kill {number:2}: {killing.kill_at(phase)}", flush=True)
    num_left = num_problems - killing.progress()[1]
    with started(directory / "last.log", *words) as process, killing_judges(process, seed) as killed:
        wait_until(lambda: process.poll() is not None)
    assert process.returncode == 0, (directory / "last.log").read_text()
    # a judge is killed after its first verdicts; with few left to judge it may end before
    assert killed or num_left < 16, "the last watcher's judge was not killed"
    process = evaluate("watch", undisturbed, *options)
    assert process.returncode == 0, process.stderr
    expected, expected_answers, expected_kinds = results_of(undisturbed, num_problems)
    metrics, answers, kinds = results_of(run_dir, num_problems)
    assert (answers, kinds) == (expected_answers, expected_kinds)
    assert metrics == expected and metrics["accepted_at_1"] == 1.0
    [job] = jobs(run_dir)
    assert (job.state, job.attempts) == ("done", 0)


def results_of(run_dir: Path, num_problems: int) -> tuple[dict[str, Any], Mapping[str, Any], Mapping[str, str]]:
    """Metrics of step 10 without times, rows of the answers by problem, and error types of the verdicts by problem."""
    directory = run_dir / "eval" / "eval_step_10"
    metrics = json.loads((directory / "metrics.json").read_text())
    values = {name: value for name, value in metrics["datasets"]["slow"].items() if name not in TIMES}
    rest = {key: metrics[key] for key in ("label", "step", "tier", "protocol", "isolation")}
    (answers,), (verdicts,) = (list(directory.glob(f"work/slow/{kind}-*.jsonl")) for kind in ("answers", "verdicts"))
    kinds = {row["problem_id"]: row["error_type"] for row in read_lines(verdicts)}
    assert len(read_lines(verdicts)) == len(kinds) == num_problems, "something was judged twice"
    rows = {row["problem_id"]: row for row in read_lines(answers)}
    assert len(read_lines(answers)) == len(rows) == num_problems, "something was answered twice"
    return {**values, **rest}, rows, kinds
