"""The main loop of an evaluation: claim jobs, run their batches, and write the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from eval_pipeline.active_job import ActiveJob
from eval_pipeline.checkpoints import EvalCheckpoint, EvalDir, lease_checkpoint
from eval_pipeline.config import EvalConfig
from eval_pipeline.jobs import HEARTBEAT_S, Job, JobKey, JobQueue
from eval_pipeline.judge.isolation import versions_of
from eval_pipeline.pool import LocalPool, WorkerPool
from eval_pipeline.problems.datasets import load_problems, problems_digest
from eval_pipeline.problems.problem import Problem
from eval_pipeline.recipe import EvalDigests, selection_metric
from eval_pipeline.report.metrics import rate_intervals, summarize
from eval_pipeline.report.results import (
    METRICS_FILE,
    SUMMARY_FILE,
    DatasetResult,
    EvaluatedModel,
    read_evaluation,
    read_results,
    write_answers,
    write_json,
    write_qa_log,
    write_verdicts,
)
from eval_pipeline.worker import BatchFailed, Event
from verl_ext.console import warn
from verl_ext.errors import UserError

EVENT_TIMEOUT_S = 0.5
"""How long the loop waits for an event before it checks for other work."""


@dataclass(frozen=True)
class Task:
    """A job that this process wants done, and the model for it."""

    checkpoint: EvalCheckpoint
    dataset: str
    digest: str
    """Digest of the job with this process's settings. This process does not run the job with other settings."""

    @property
    def key(self) -> JobKey:
        """Key of the job."""
        return self.checkpoint.label, self.dataset


class TaskSource(Protocol):
    """Says which jobs are wanted; the list may change while they run."""

    def poll(self) -> Sequence[Task]:
        """The jobs that are wanted now, the most urgent first, including jobs that have ended."""

    @property
    def exhausted(self) -> bool:
        """Whether all jobs have ended and no more will come, as of the last `poll`."""


def run_jobs(context: EvalContext, source: TaskSource, publish: Callable[[Sequence[Task]], set[str]]) -> set[str]:
    """Run jobs until the source is exhausted. Every step resumes from disk after a kill.

    Args:
        source: says which jobs are wanted.
        publish: publishes the results of checkpoints whose jobs have ended; returns their labels.

    Returns:
        Labels of the checkpoints whose results were published.

    Raises:
        UserError: no job can run, for example because a Ray cluster cannot be reached.
    """
    published: set[str] = set()
    with open_pool(context.config) as pool, context.jobs.heartbeat():
        runner = JobRunner(context, pool)
        try:
            while True:
                tasks = source.poll()
                published |= publish(tasks)
                runner.lease_only({task.checkpoint.label for task in context.unfinished(tasks)})
                if source.exhausted:
                    return published
                runner.step(tasks)
        finally:
            runner.release()


def open_pool(config: EvalConfig) -> WorkerPool:
    """Create the configured pool, without starting it."""
    if config.executor.kind == "ray":
        from eval_pipeline.ray_pool import RayPool  # Ray takes seconds to import

        return RayPool(config)
    return LocalPool(config)


class JobRunner:
    """Runs jobs on a pool of workers. Only the runner writes claims and job files, so workers need no locks.

    Args:
        pool: the workers; the caller closes it.
    """

    def __init__(self, context: EvalContext, pool: WorkerPool) -> None:
        self._context, self._jobs, self._pool = context, context.jobs, pool
        self._active: dict[int, ActiveJob] = {}  # by claim
        self._leases: dict[str, ExitStack] = {}  # by label
        self._recorded = time.monotonic()
        self._warned: set[tuple[str, str, str | None]] = set()

    def step(self, tasks: Sequence[Task]) -> None:
        """Submit batches while there is room, handle the next events, and finish completed jobs."""
        self._dispatch(tasks)
        # even without an active job: workers start and die, and batches of failed jobs still end
        for event in self._pool.events(EVENT_TIMEOUT_S):
            self._handle(event)
        self._finish_completed()
        self._record_seconds()
        if not self._active:
            self._warn_of_waiting(tasks)

    def _dispatch(self, tasks: Sequence[Task]) -> None:
        """Submit batches of active jobs first, then claim another job."""
        while True:
            has_room = self._pool.has_room_for
            ready = [job for job in self._active.values() if job.has_batches and has_room(job.checkpoint.export)]
            if ready:
                self._pool.submit(ready[0].next_batch())
            elif not self._claim(tasks):
                return

    def _claim(self, tasks: Sequence[Task]) -> bool:
        """Claim a job whose model a worker has room for; returns whether there was one."""
        active = {job.job.key for job in self._active.values()}
        open_tasks = {
            task.key: task
            for task in tasks
            if task.key not in active and self._pool.has_room_for(task.checkpoint.export)
        }
        job = self._jobs.claim((*task.key, task.digest) for task in open_tasks.values())
        if job is None:
            return False
        checkpoint = open_tasks[job.key].checkpoint
        try:
            self._lease(checkpoint)
            active_job = self._context.open_job(job, checkpoint)
        except UserError as error:
            self._report_failure(job, str(error), job.seconds)
        else:
            self._active[active_job.claim] = active_job
        return True

    def _handle(self, event: Event) -> None:
        job = self._active.get(event.batch.claim)
        if job is None:
            return  # an event of an attempt that failed or was lost
        try:
            error = job.handle(event)
        except OSError as failure:
            error = f"cannot write the results ({failure}); free disk space"
        if error is not None:
            self._fail(job, error, is_final=isinstance(event, BatchFailed) and event.is_final)

    def _finish_completed(self) -> None:
        for job in [job for job in self._active.values() if job.is_complete]:
            if job.retry_api_errors() or not self._still_holds(job):
                continue
            seconds = job.seconds
            try:
                write_job_result(self._context, job)
            except UserError as error:
                self._fail(job, str(error))
                continue
            self._close(job)
            if not self._jobs.finish(job.job, seconds):
                warn(f"another process has taken over {job.job}; it writes the same results")

    def _record_seconds(self) -> None:
        """Store the time spent on active jobs; drop those that another process has taken over."""
        if time.monotonic() - self._recorded >= HEARTBEAT_S:
            self._recorded = time.monotonic()
            for job in list(self._active.values()):
                self._still_holds(job)

    def _still_holds(self, job: ActiveJob) -> bool:
        if self._jobs.record_seconds(job.job, job.seconds):
            return True
        warn(f"another process has taken over {job.job}; skipping it")
        self._close(job)
        return False

    def _fail(self, job: ActiveJob, error: str, is_final: bool = False) -> None:
        self._close(job)
        self._report_failure(job.job, error, job.seconds, is_final)

    def _report_failure(self, job: Job, error: str, seconds: Mapping[str, float], is_final: bool = False) -> None:
        if not self._jobs.fail(job, error, seconds, is_final):
            warn(f"another process has taken over {job}, which failed in this process: {error}")
            return
        attempts = job.attempts + 1
        left = self._jobs.max_attempts - attempts
        if is_final:
            then = "not retried; fix the cause and re-queue it with `retry`"
        elif left > 0:
            then = f"next attempt in {self._jobs.pause_s(attempts):.0f} s, {left} left"
        else:
            then = "no attempts left; fix the cause and re-queue it with `retry`"
        warn(f"{job} failed: {error}; {then}")

    def _close(self, job: ActiveJob) -> None:
        self._active.pop(job.claim).close()

    def _lease(self, checkpoint: EvalCheckpoint) -> None:
        if checkpoint.label not in self._leases:
            stack = ExitStack()
            stack.enter_context(lease_checkpoint(checkpoint))
            self._leases[checkpoint.label] = stack

    def lease_only(self, labels: Collection[str]) -> None:
        """Release the leases of all other checkpoints, so that rotation may remove them."""
        for label in self._leases.keys() - set(labels):
            self._leases.pop(label).close()

    def release(self) -> None:
        """Return unfinished jobs and release leases; answers and verdicts stay on disk."""
        for active in list(self._active.values()):
            self._close(active)
            self._jobs.release(active.job, active.seconds)
        self.lease_only(())

    def _warn_of_waiting(self, tasks: Sequence[Task]) -> None:
        """Warn once about each job that another process holds."""
        wanted = {task.key: task.digest for task in tasks}
        for job in self._jobs.jobs():
            note = (*job.key, job.worker)
            if job.key not in wanted or note in self._warned:
                continue
            has_same_settings = wanted[job.key] == job.digest
            if job.state == "running":
                how = "" if has_same_settings else " with other settings"
                warn(f"{job.worker} is evaluating {job}{how}; waiting for that worker")
            elif not has_same_settings:
                warn(f"another process has queued {job} with other settings; waiting for that process to end")
            else:
                continue
            self._warned.add(note)


def write_job_result(context: EvalContext, active: ActiveJob) -> None:
    """Write the verdicts, the answers, a sample of them and `result.json` of a completed job.

    Raises:
        UserError: a file cannot be written.
    """
    job, checkpoint, config = active.job, active.checkpoint, context.config
    judged, seconds = active.judged_answers(), active.seconds
    directory = context.directory.results_of(job.checkpoint)
    write_verdicts(directory, job.dataset, judged)
    write_answers(directory, job.dataset, judged)
    write_qa_log(directory, job.dataset, judged, config.qa_per_error_type)
    source = asdict(config.sources[job.dataset])
    for key in ("sample", "system_prompt"):  # so that results of most evaluations keep their form
        if source[key] is None:
            del source[key]
    result = DatasetResult(
        metrics=summarize(judged, elapsed_s=seconds["active_s"]),
        intervals=rate_intervals(judged),
        tier=job.tier,
        protocol={
            **active.context["protocol"],
            **context.compared_settings(job.dataset),
            "batch_size": config.batch_size,
            "source": source,
        },
        isolation=active.context["isolation"],
        seconds=seconds,
    )
    model = EvaluatedModel(
        label=checkpoint.label,
        step=checkpoint.step,
        checkpoint=checkpoint.path,
        export=str(checkpoint.export or config.engine.model or checkpoint.label),
        weights=context.weights_of(job.checkpoint),
        datasets={job.dataset: result},
    )
    write_json(context.directory.job_result(job.checkpoint, job.dataset), model.to_json())


class EvalContext:
    """The directory, configuration and job queue of an evaluation, with its problems and digests.

    Raises:
        UserError: the job queue cannot be used.
    """

    def __init__(self, directory: EvalDir, config: EvalConfig) -> None:
        self.directory, self.config = directory, config
        self.jobs = JobQueue(directory.root, config.max_attempts, config.backoff_s)
        self._problems: dict[str, list[Problem]] = {}
        self._problem_digests: dict[str, str] = {}
        self._verified: set[tuple[str, str]] = set()
        self._weights: dict[str, str] = {}
        self._digests: dict[JobKey, EvalDigests] = {}

    def problems(self, dataset: str) -> list[Problem]:
        """The problems of a dataset, read once.

        Raises:
            UserError: they cannot be read.
        """
        if dataset not in self._problems:
            self._problems[dataset] = load_problems(self.config.sources[dataset], self.config.judge.limits.output_mb)
            self._problem_digests[dataset] = problems_digest(self._problems[dataset])
        return self._problems[dataset]

    def problems_digest(self, dataset: str) -> str:
        """Digest of the problems of a dataset."""
        self.problems(dataset)
        return self._problem_digests[dataset]

    def selection_metric(self) -> str:
        """The metric that selects the best checkpoint.

        Raises:
            UserError: a dataset cannot be read, or has no such metric; see `recipe.selection_metric`.
        """
        runs_code = any(problem.runs_code for name in self.config.selected_on for problem in self.problems(name))
        return selection_metric(self.config, runs_code)

    def compared_settings(self, dataset: str) -> dict[str, Any]:
        """The part of the protocol that must be equal for results to be comparable."""
        kwargs = self.config.engine.chat_template_kwargs
        return {
            "sampling": asdict(self.config.sampling),
            "limits": asdict(self.config.judge.limits),
            "packages": versions_of(self.config.judge.packages),
            "problems_digest": self.problems_digest(dataset),
            **({"chat_template_kwargs": kwargs} if kwargs else {}),  # so that most results keep their form
        }

    def add_jobs(self, checkpoint: EvalCheckpoint, tier: int) -> list[Task]:
        """Add a checkpoint's jobs up to a tier to the queue.

        Raises:
            UserError: a dataset cannot be read, or the checkpoint has just been removed.
        """
        datasets = self.config.datasets_up_to(tier)
        try:
            identity = checkpoint.identity()
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {checkpoint.path} ({error}); specify another checkpoint") from error
        label, ended = checkpoint.label, self._ended()
        for name, _ in datasets:
            digests = self._digests[label, name] = self._compute_digests(label, identity, name, ended)
            if self._weights.get(label) != digests.model:
                self._weights[label] = digests.model
                self._drop_results_of_other_weights(label)
        tasks = [Task(checkpoint, name, self._digests[label, name].verdicts) for name, _ in datasets]
        self.jobs.add_all((*task.key, its_tier, task.digest) for task, (_, its_tier) in zip(tasks, datasets))
        return tasks

    def has_results(self, checkpoint: EvalCheckpoint, tier: int) -> bool:
        """Whether a checkpoint has results, all of them for its current weights and these settings.

        Raises:
            UserError: a dataset cannot be read.
        """
        label, ended = checkpoint.label, self._ended()
        done = {job.dataset: job.digest for job in self.jobs.jobs() if job.checkpoint == label and job.state == "done"}
        names = [name for name, _ in self.config.datasets_up_to(tier) if name in done]
        try:
            identity = checkpoint.identity() if names else None
        except (OSError, ValueError):
            return False
        return bool(names) and all(
            done[name] == self._compute_digests(label, identity, name, ended).verdicts for name in names
        )

    def _compute_digests(
        self, label: str, identity: Any, dataset: str, ended: Collection[tuple[str, str, str]]
    ) -> EvalDigests:
        """Compute the digests with the installed packages, or with those that a finished job was judged with.

        Newer packages could change a verdict, but a new release is no reason to judge everything again.
        """
        installed, problems = versions_of(self.config.judge.packages), self.problems_digest(dataset)
        digests = EvalDigests.of(identity, problems, self.config, installed)
        if (label, dataset, digests.verdicts) not in ended:
            judged_with = self._packages_of_result(label, dataset)
            if judged_with != installed and judged_with.keys() == installed.keys():
                previous = EvalDigests.of(identity, problems, self.config, judged_with)
                if (label, dataset, previous.verdicts) in ended:
                    return previous
        return digests

    def _packages_of_result(self, label: str, dataset: str) -> dict[str, str]:
        """Package versions of the last result; empty if it cannot be read, so that the job is judged again."""
        try:
            last = read_results(self.directory.job_result(label, dataset), "judge again")
            return dict(last.datasets[dataset].protocol["packages"])
        except (UserError, ValueError, KeyError, TypeError):
            return {}

    def _drop_results_of_other_weights(self, label: str) -> None:
        """Remove the results of a checkpoint that was trained again, so that they do not count in the meantime."""
        directory = self.directory.results_of(label)
        if not (directory / METRICS_FILE).exists():
            return
        try:
            if read_evaluation(directory).weights == self._weights[label]:
                return
            warn(f"the weights of {label} have changed since the results in {directory}; evaluating it again")
        except UserError as error:
            warn(str(error))
        for name in (METRICS_FILE, SUMMARY_FILE):
            (directory / name).unlink(missing_ok=True)
        self.jobs.mark_published(label, "")

    def weights_of(self, label: str) -> str:
        """Digest of a checkpoint's current weights."""
        return self._weights[label]

    def open_job(self, job: Job, checkpoint: EvalCheckpoint) -> ActiveJob:
        """Open the files of a claimed job.

        Raises:
            UserError: the export is damaged, or the files cannot be written.
        """
        digests = self._digests[job.key]
        # by label too: of two checkpoints with equal weights, one may be damaged
        if checkpoint.export is not None and (job.checkpoint, digests.model) not in self._verified:
            checkpoint.verify_export()
            self._verified.add((job.checkpoint, digests.model))
        directory = self.directory.work_of(job.checkpoint, job.dataset)
        try:
            return ActiveJob(job, checkpoint, self.problems(job.dataset), self.config, digests, directory)
        except OSError as error:
            raise UserError(
                f"cannot write to {directory} ({error.strerror}); free disk space or fix the directory"
            ) from error

    def unfinished(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks whose jobs have not ended."""
        ended = self._ended()
        return [task for task in tasks if (*task.key, task.digest) not in ended]

    def _ended(self) -> set[tuple[str, str, str]]:
        return {(*job.key, job.digest) for job in self.jobs.jobs() if job.has_ended}
