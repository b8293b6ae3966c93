"""Follows a training run: every new checkpoint by tier, and an end when the run has finished and nothing is left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from eval_pipeline.executors.executor import require_engine
from eval_pipeline.flow.publish import Publisher
from eval_pipeline.flow.run_status import RunStatus
from eval_pipeline.flow.session import Session
from eval_pipeline.flow.work_off import work_off
from eval_pipeline.ledger.job import Job
from eval_pipeline.models.checkpoint import Checkpoint
from eval_pipeline.models.discover import Discovery
from eval_pipeline.models.run_config import read_run_config
from eval_pipeline.report.selection import read_best_checkpoint
from eval_pipeline.work.driver import Task
from verl_ext.checkpoint.manifest import BEST
from verl_ext.commands import typed_command
from verl_ext.console import print_line, print_next, print_summary, typed_path, warn
from verl_ext.errors import UserError

MAX_NAMED = 5
"""Most failed evaluations that the summary names."""


class Watcher:
    """What a `watch` wants done, looked at anew every `poll_s`; an `Agenda`.

    Tier 1 is for every checkpoint, tier 2 for every `tier2_every`-th that was seen, tier 3 for the best one at the end.

    Args:
        session: of a run's place.
        publisher: its choice of the best decides on tier 3.
    """

    def __init__(self, session: Session, publisher: Publisher) -> None:
        self._session, self._publisher = session, publisher
        self._run_dir = session.place.of_run
        self._discovery = Discovery(self._run_dir)
        self._status = RunStatus(self._run_dir)
        self._tasks: list[Task] = []
        self._last: list[Task] = []
        self._missing: set[str] = set()
        self._told_removed: set[str] = set()
        self._looked = float("-inf")
        self._is_over = False
        self.wanted: set[tuple[str, str]] = set()
        """Keys of all jobs that were wanted so far."""

    def tasks(self) -> Sequence[Task]:
        """See `Agenda`."""
        if time.monotonic() - self._looked >= self._session.recipe.poll_s:
            self._look()
        return self._tasks

    def is_over(self) -> bool:
        """See `Agenda`."""
        return self._is_over

    def _look(self) -> None:
        # asked first: a checkpoint that is committed after this look is then not missed
        has_finished = self._status.has_finished()
        checkpoints = self._discovery.checkpoints()
        self._want([*self._enter(checkpoints), *self._removed_under_way(checkpoints)])
        self._give_up_removed()
        if has_finished and not self._session.left_of(self._tasks):
            # the choice hangs on it; with the last tier, or the best one would be published while that is under way
            self._publisher.publish([*self._tasks, *self._last])
            self._last = self._last_tier(checkpoints)
            self._want(self._last)
            self._is_over = not self._session.left_of(self._tasks)
        self._looked = time.monotonic()

    def _want(self, tasks: list[Task]) -> None:
        self._tasks = tasks
        self.wanted |= {task.key for task in tasks}

    def _enter(self, checkpoints: Sequence[Checkpoint]) -> list[Task]:
        steps = {_step_of(job.checkpoint) for job in self._session.ledger.jobs()} | {each.step for each in checkpoints}
        order = sorted(step for step in steps if step is not None)
        tasks: list[Task] = []
        for checkpoint in checkpoints:
            assert checkpoint.step is not None  # a run saved it
            is_second = (order.index(checkpoint.step) + 1) % self._session.recipe.tier2_every == 0
            try:
                tasks += self._session.enter(checkpoint, 2 if is_second else 1)
            except UserError as error:
                if checkpoint.path.exists():
                    raise
                warn(str(error))  # rotation was faster
        tiers = {(job.checkpoint, job.dataset): job.tier for job in self._session.ledger.jobs()}
        return sorted(tasks, key=lambda task: tiers[task.key])

    def _removed_under_way(self, checkpoints: Sequence[Checkpoint]) -> list[Task]:
        """Tasks of checkpoints that were removed while they were evaluated, as by hand: their results still count."""
        there = {checkpoint.label for checkpoint in checkpoints}
        states = {(job.checkpoint, job.dataset, job.digest): job.state for job in self._session.ledger.jobs()}
        gone = [task for task in self._tasks if task.checkpoint.label not in there]
        by_state = {
            state: [task for task in gone if states.get((*task.key, task.digest)) == state]
            for state in ("running", "done")
        }
        for label in {task.checkpoint.label for task in by_state["running"]} - self._told_removed:
            self._told_removed.add(label)
            warn(f"{label} was removed during its evaluation; its results are kept, but it cannot be selected as best")
        return by_state["running"] + by_state["done"]

    def _last_tier(self, checkpoints: Sequence[Checkpoint]) -> list[Task]:
        if not (self._run_dir / BEST).exists():
            return []  # nothing could be evaluated, so nothing is best
        best = read_best_checkpoint(self._run_dir).step
        chosen = [checkpoint for checkpoint in checkpoints if checkpoint.step == best]
        if not chosen:
            warn(f"the best checkpoint, step {best}, can no longer be loaded; tier 3 is skipped")
        return [task for checkpoint in chosen for task in self._session.enter(checkpoint, 3)]

    def _give_up_removed(self) -> None:
        """Give up what is missing for the second time: a file system may stumble once."""
        steps = {job.checkpoint: _step_of(job.checkpoint) for job in self._session.ledger.jobs()}
        missing = {
            label
            for label, step in steps.items()
            if step is not None and not (self._run_dir / f"global_step_{step}").exists()
        }
        for label, dataset in self._session.ledger.give_up(missing & self._missing):
            warn(f"{label} was removed before its evaluation on {dataset}; raise trainer.max_ckpt_to_keep")
        self._missing = missing


def watch(session: Session, recipe_name: str | None = None) -> int:
    """Evaluate a run's checkpoints until it has finished and nothing is left.

    Args:
        session: of a run's place.
        recipe_name: `--recipe` as it was typed, which the next commands need too.

    Returns:
        0, or 1 when a data set failed or there was no checkpoint to evaluate.

    Raises:
        UserError: the run's record or a data set cannot be read, or no work can be done at all.
    """
    if not session.recipe.tiers.names:
        raise UserError("the recipe's tiers name no data set, so there is nothing to evaluate; set tiers.tier1")
    require_engine(session.recipe)
    run_dir, results = typed_path(session.place.of_run), typed_path(session.place.root)
    print_line(f"Watching {run_dir} until the run has finished. Results go to {results}.")
    publisher = Publisher(session, leads=True)
    watcher = Watcher(session, publisher)
    work_off(session, watcher, publisher)
    if not watcher.wanted:
        warn("the run has finished without a checkpoint that can be evaluated; set trainer.save_freq and export.every")
    elif not (session.place.of_run / BEST).exists():
        selection = session.recipe.selection
        on = "the data sets of tiers.tier1" if selection.dataset is None else selection.dataset
        warn(f"no best checkpoint was chosen, because none has results of {selection.metric} on {on}")
    failed = [job for job in session.ledger.jobs() if job.state == "failed" and job.key in watcher.wanted]
    _tell_end(session, failed, len(watcher.wanted), ["--recipe", recipe_name] if recipe_name else [])
    return int(not watcher.wanted or bool(failed))


def _tell_end(session: Session, failed: Sequence[Job], num_wanted: int, recipe: Sequence[str]) -> None:
    run_dir, best = session.place.of_run, None
    run, script = typed_path(run_dir), typed_command("eval")
    then: list[list[str]] = []
    if (run_dir / BEST).exists():
        chosen, base = read_best_checkpoint(run_dir), read_run_config(run_dir).base
        best = f"global_step_{chosen.step}, by {chosen.metric} on {', '.join(chosen.datasets)}"
        model = Path(base).expanduser() if base else None
        if model is not None and (model / "config.json").is_file():
            then = [[*script, "report", run, "--baseline", str(model), *recipe]]
    failures = None
    if failed:
        names = [f"{job.checkpoint} on {job.dataset}" for job in failed[:MAX_NAMED]]
        more = [f"{len(failed) - MAX_NAMED} more"] if len(failed) > MAX_NAMED else []
        failures = f"{len(failed)} of {num_wanted} evaluations: {', '.join(names + more)}"
        then = [[*script, "status", run], [*script, "retry", run], [*script, "watch", run, *recipe]]
    rows = {"best checkpoint": best, "failed": failures, "results": typed_path(session.place.root)}
    print_summary(f"Finished: evaluation of {run_dir.name}", rows)
    print_next(then)


def _step_of(label: str) -> int | None:
    number = label.removeprefix("step_")
    return int(number) if label.startswith("step_") and number.isdigit() else None
