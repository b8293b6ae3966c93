"""Which jobs are wanted: every new checkpoint of a training run, or one model."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from eval_pipeline.checkpoints import CheckpointScanner, EvalCheckpoint, read_training_run
from eval_pipeline.jobs import Job, JobKey
from eval_pipeline.pool import require_engine
from eval_pipeline.publish import Publisher
from eval_pipeline.report.selection import read_best_checkpoint
from eval_pipeline.run import EvalContext, Task, run_jobs
from verl_ext.checkpoint.manifest import BEST
from verl_ext.commands import program, typed_command
from verl_ext.console import print_line, print_next, print_summary, typed_path, warn
from verl_ext.errors import UserError
from verl_ext.metrics.run_record import RUN_FILE, load_run

MAX_NAMED = 5
"""Maximum number of failed evaluations that the summary names."""
_WAITING = {
    "waiting": "the run in {run_dir} has not been started yet; waiting for its first checkpoint (press Ctrl-C to stop)",
    "stopped": "the run was stopped; waiting for it to resume (press Ctrl-C to stop)",
    "failed": "the run has failed; waiting for it to resume (press Ctrl-C to stop)",
}
"""Warnings by status of the training run."""


class RunStartedError(Exception):
    """The run has written its configuration, and chat template arguments in it determine the prompts."""


def watch_run(context: EvalContext, recipe: Sequence[str]) -> int:
    """Evaluate the checkpoints of a training run until it has finished and nothing is left.

    Args:
        recipe: `--recipe` and `key=value` as typed, for the suggested next commands.

    Returns:
        0, or 1 if a job failed or there was no checkpoint to evaluate.

    Raises:
        UserError: the run's record or a dataset cannot be read, the datasets have no such selection metric, or no job
            can run.
        RunStartedError: `context` was created before the run's first checkpoint, and lacks arguments of the template.
    """
    if not context.config.tiers.names:
        raise UserError("no tier of the recipe lists a dataset, so there is nothing to evaluate; set tiers.tier1")
    metric = context.selection_metric()
    require_engine(context.config)
    run_dir, results = typed_path(context.directory.of_run), typed_path(context.directory.root)
    print_line(f"Watching {run_dir} until the run has finished. Results go to {results}.")
    publisher = Publisher(context, owns_selection=True)
    watcher = RunWatcher(context, publisher)
    run_jobs(context, watcher, publisher.publish)
    if not watcher.wanted:
        export = f"{program('checkpoint')} export {shlex.quote(run_dir)}"
        warn(
            "the run has finished without a checkpoint that can be evaluated; add hf_model to trainer.checkpoint."
            f"save_contents, or run `{export}`"
        )
    elif not (context.directory.of_run / BEST).exists():
        selection = context.config.selection
        on = "the datasets of tiers.tier1" if selection.dataset is None else selection.dataset
        warn(
            f"no best checkpoint was selected, because none has results for {metric} on {on}; check "
            "selection.metric and selection.dataset"
        )
    failed = [job for job in context.jobs.jobs() if job.state == "failed" and job.key in watcher.wanted]
    _print_summary(context, failed, len(watcher.wanted), recipe)
    return int(not watcher.wanted or bool(failed))


def evaluate_checkpoint(context: EvalContext, checkpoint: EvalCheckpoint, tier: int) -> int:
    """Evaluate one model on the datasets up to a tier; failed jobs are retried.

    Returns:
        0, or 1 if a job failed.

    Raises:
        UserError: no tier lists a dataset, a dataset cannot be read or has no such selection metric, the directory
            holds another model's evaluation, another process evaluates this model there with other settings, or no
            job can run.
    """
    others = {job.checkpoint for job in context.jobs.jobs()} - {checkpoint.label}
    if context.directory.one_model and others:
        raise UserError(
            f"{context.directory.root} holds the evaluation of {min(others)}; specify another --output for "
            f"{checkpoint.label}"
        )
    run_dir = None if context.directory.one_model else context.directory.run_dir
    if run_dir is not None and not (run_dir / BEST).exists():
        context.selection_metric()  # refuse a metric before the evaluation, not when it selects
    tasks = context.add_jobs(checkpoint, tier)
    if not tasks:
        raise UserError(f"no tier of the recipe up to {tier} lists a dataset; set tiers.tier{tier}")
    keys = [task.key for task in tasks]
    context.jobs.retry(only=keys)
    if any(job.key in keys and job.state != "done" for job in context.jobs.jobs()):
        require_engine(context.config)
    published = run_jobs(context, FixedTasks(context, tasks), Publisher(context, owns_selection=False).publish)
    failed = [job for job in context.jobs.jobs() if job.state == "failed" and job.key in keys]
    if failed:
        reasons = {job.dataset: (job.error or "").partition("\n")[0] for job in failed}
        print_summary(f"Failed: evaluation of {checkpoint.label}", reasons)
    elif checkpoint.label not in published:
        directory = context.directory.results_of(checkpoint.label)
        rows = {"results": typed_path(directory)}
        if checkpoint.served is not None and checkpoint.served_files is None:
            rows["weights"] = "not compared with the server's; if it has other weights now, specify another --output"
        print_summary(f"Already evaluated: {checkpoint.label}", rows)
    return int(bool(failed))


class FixedTasks:
    """A `TaskSource` for the jobs of one model."""

    def __init__(self, context: EvalContext, tasks: Sequence[Task]) -> None:
        self._context, self._tasks = context, tasks

    def poll(self) -> Sequence[Task]:
        """Return all tasks.

        Raises:
            UserError: another process has changed the settings of a job.
        """
        digests = {job.key: job.digest for job in self._context.jobs.jobs()}
        for task in self._tasks:
            if digests[task.key] != task.digest:
                raise UserError(
                    f"another process is evaluating {task.checkpoint.label} on {task.dataset} with other settings; "
                    "wait until it ends, or specify another directory with --output"
                )
        return self._tasks

    @property
    def exhausted(self) -> bool:
        return not self._context.unfinished(self._tasks)


class RunWatcher:
    """A `TaskSource` for the checkpoints of a training run, which it scans every `poll_s`.

    Tier 1 is for every checkpoint, tier 2 for every `tier2_every`-th, and tier 3 for the best one at the end.

    Args:
        publisher: selects the best checkpoint for tier 3.

    Attributes:
        exhausted: see `TaskSource`.
        wanted: keys of all jobs wanted so far.
    """

    def __init__(self, context: EvalContext, publisher: Publisher) -> None:
        self._context, self._publisher = context, publisher
        self._run_dir = context.directory.of_run
        self._scanner = CheckpointScanner(self._run_dir)
        self._scanned = float("-inf")
        self._tasks: list[Task] = []
        self._tier3: list[Task] = []
        self._missing: set[str] = set()
        self._warned_removed: set[str] = set()
        self._status = ""
        self.exhausted = False
        self.wanted: set[JobKey] = set()

    def poll(self) -> Sequence[Task]:
        """Return the tasks of all checkpoints, after a scan of the run if one is due.

        Raises:
            UserError: the run's record or a dataset cannot be read.
            RunStartedError: see `watch_run`.
        """
        if time.monotonic() - self._scanned >= self._context.config.poll_s:
            self._scan()
            self._scanned = time.monotonic()
        return self._tasks

    def _scan(self) -> None:
        has_finished = self.has_finished()  # read before the scan, so that no later checkpoint is missed
        checkpoints = self._scanner.checkpoints()
        if checkpoints:
            self._require_template_arguments()
        self._want([*self._add_jobs(checkpoints), *self._removed_tasks(checkpoints)])
        self._fail_removed()
        if has_finished and not self._context.unfinished(self._tasks):
            # Tier 3 depends on the selection. The tasks of tier 3 are passed too, or the best checkpoint would be
            # published while they run.
            self._publisher.publish([*self._tasks, *self._tier3])
            self._publisher.select_again()
            self._tier3 = self._tier3_tasks(checkpoints)
            self._want(self._tier3)
            self.exhausted = not self._context.unfinished(self._tasks)

    def _require_template_arguments(self) -> None:
        own = self._context.config.engine.chat_template_kwargs
        if {**read_training_run(self._run_dir).chat_template_kwargs, **own} != own:
            raise RunStartedError

    def has_finished(self) -> bool:
        """Whether no further checkpoint will come; warns if the run must be started or resumed first.

        Raises:
            UserError: the record cannot be read.
        """
        run = load_run(self._run_dir / RUN_FILE)
        status = run["status"]
        is_starting = status == "waiting" and run["project"] is not None  # its launcher has created the record
        if status != self._status and status in _WAITING and not is_starting:
            warn(_WAITING[status].format(run_dir=self._run_dir))
        self._status = status
        return status == "finished"

    def _want(self, tasks: list[Task]) -> None:
        self._tasks = tasks
        self.wanted |= {task.key for task in tasks}

    def _add_jobs(self, checkpoints: Sequence[EvalCheckpoint]) -> list[Task]:
        """Add the jobs of tiers 1 and 2; returns them ordered by tier."""
        steps = {_step_of(job.checkpoint) for job in self._context.jobs.jobs()} | {each.step for each in checkpoints}
        order = sorted(step for step in steps if step is not None)
        tasks: list[Task] = []
        for checkpoint in checkpoints:
            assert checkpoint.step is not None  # checkpoints of a run have one
            is_tier2 = (order.index(checkpoint.step) + 1) % self._context.config.tier2_every == 0
            try:
                tasks += self._context.add_jobs(checkpoint, 2 if is_tier2 else 1)
            except UserError as error:
                if checkpoint.path.exists():
                    raise
                warn(str(error))  # rotation has just removed it
        tiers = {job.key: job.tier for job in self._context.jobs.jobs()}
        return sorted(tasks, key=lambda task: tiers[task.key])

    def _removed_tasks(self, checkpoints: Sequence[EvalCheckpoint]) -> list[Task]:
        """Tasks of checkpoints that were removed during their evaluation, for example by hand: results still count."""
        labels = {checkpoint.label for checkpoint in checkpoints}
        states = {(*job.key, job.digest): job.state for job in self._context.jobs.jobs()}
        removed = [task for task in self._tasks if task.checkpoint.label not in labels]
        running, done = (
            [task for task in removed if states.get((*task.key, task.digest)) == state] for state in ("running", "done")
        )
        for label in {task.checkpoint.label for task in running} - self._warned_removed:
            self._warned_removed.add(label)
            warn(f"{label} was removed during its evaluation; its results are kept, but it cannot be selected as best")
        return running + done

    def _fail_removed(self) -> None:
        """Fail the jobs of checkpoints that are missing in two consecutive scans, because a file system may err."""
        steps = {job.checkpoint: _step_of(job.checkpoint) for job in self._context.jobs.jobs()}
        missing = {
            label
            for label, step in steps.items()
            if step is not None and not (self._run_dir / f"global_step_{step}").exists()
        }
        for label, dataset in self._context.jobs.fail_removed(missing & self._missing):
            warn(f"{label} was removed before its evaluation on {dataset}; raise trainer.max_ckpt_to_keep")
        self._missing = missing

    def _tier3_tasks(self, checkpoints: Sequence[EvalCheckpoint]) -> list[Task]:
        if not (self._run_dir / BEST).exists():
            return []  # no checkpoint could be evaluated
        best = read_best_checkpoint(self._run_dir).step
        selected = [checkpoint for checkpoint in checkpoints if checkpoint.step == best]
        if not selected:
            warn(f"the best checkpoint, step {best}, can no longer be loaded; tier 3 is skipped")
        return [task for checkpoint in selected for task in self._context.add_jobs(checkpoint, 3)]


def _step_of(label: str) -> int | None:
    number = label.removeprefix("step_")
    return int(number) if label.startswith("step_") and number.isdigit() else None


def _print_summary(context: EvalContext, failed: Sequence[Job], num_wanted: int, recipe: Sequence[str]) -> None:
    run_dir, best = context.directory.of_run, None
    run, script = typed_path(run_dir), typed_command("eval")
    then: list[list[str]] = []
    if (run_dir / BEST).exists():
        selected, base = read_best_checkpoint(run_dir), read_training_run(run_dir).base
        best = f"global_step_{selected.step}, by {selected.metric} on {', '.join(selected.datasets)}"
        model = Path(base).expanduser() if base else None
        if model is not None and (model / "config.json").is_file():
            then = [[*script, "report", run, "--baseline", str(model), *recipe]]
    failures = None
    if failed:
        names = [str(job) for job in failed[:MAX_NAMED]]
        more = [f"{len(failed) - MAX_NAMED} more"] if len(failed) > MAX_NAMED else []
        failures = f"{len(failed)} of {num_wanted} evaluations: {', '.join(names + more)}"
        then = [[*script, "status", run], [*script, "retry", run], [*script, "watch", run, *recipe]]
    rows = {"best checkpoint": best, "failed": failures, "results": typed_path(context.directory.root)}
    print_summary(f"Finished: evaluation of {run_dir.name}", rows)
    print_next(then)
