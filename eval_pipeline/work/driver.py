"""Gives the work out and takes it in: the one process that writes the ledger's claims and the files of the jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from eval_pipeline.executors.executor import Executor
from eval_pipeline.ledger.holder import RENEWAL_S
from eval_pipeline.ledger.job import Job
from eval_pipeline.ledger.ledger import Ledger
from eval_pipeline.models.checkpoint import Checkpoint
from eval_pipeline.models.hold import held
from eval_pipeline.work.batch import Event
from eval_pipeline.work.evaluation import Evaluation
from verl_ext.console import warn
from verl_ext.errors import UserError

WAIT_S = 0.5
"""How long the driver waits for an event before it looks for something else to do."""


@dataclass(frozen=True)
class Task:
    """A job that this process may claim, and the model it is about.

    Attributes:
        checkpoint: the model.
        dataset: name of the data set.
        digest: of the job as this process would do it; one with other settings is not its to do.
    """

    checkpoint: Checkpoint
    dataset: str
    digest: str

    @property
    def key(self) -> tuple[str, str]:
        """Of the job in the ledger."""
        return self.checkpoint.label, self.dataset


class Driver:
    """Works on jobs until it is told that nothing is left.

    Args:
        ledger: of the run.
        executor: has the workers; it is not closed here.
        begin: makes the evaluation of a claimed job; raises `UserError` where the job cannot be begun.
        complete: writes the files of an evaluation whose last verdict is in.
    """

    def __init__(
        self,
        ledger: Ledger,
        executor: Executor,
        begin: Callable[[Job, Checkpoint], Evaluation],
        complete: Callable[[Evaluation], None],
    ) -> None:
        self._ledger, self._executor, self._begin, self._complete = ledger, executor, begin, complete
        self._active: dict[tuple[str, str, str], tuple[Evaluation, ExitStack]] = {}
        self._leases: dict[str, ExitStack] = {}
        self._renewed = time.monotonic()

    @property
    def is_idle(self) -> bool:
        """Whether this process holds no job."""
        return not self._active

    def turn(self, tasks: Sequence[Task]) -> None:
        """Give out what there is room for, and take in what comes within `WAIT_S`.

        Args:
            tasks: the most urgent first.
        """
        self._give_out(tasks)
        # also with no job at hand: workers come and die, and batches of a job that has failed still end
        for event in self._executor.events(WAIT_S):
            self._take_in(event)
        for evaluation in [entry[0] for entry in self._active.values() if entry[0].is_complete]:
            if not evaluation.try_errors_again():
                self._end(evaluation)
        self._renew()

    def _give_out(self, tasks: Sequence[Task]) -> None:
        while True:
            waiting = [evaluation for evaluation, _ in self._active.values() if evaluation.has_waiting]
            waiting = [each for each in waiting if self._executor.has_room_for(each.checkpoint.export)]
            if waiting:
                self._executor.submit(waiting[0].next_batch())
            elif not self._claim(tasks):
                return

    def _claim(self, tasks: Sequence[Task]) -> bool:
        """Begin one more job if a worker has room for its model; returns whether that changed anything."""
        mine = {(job[0], job[1]) for job in self._active}
        open_tasks = [
            task for task in tasks if task.key not in mine and self._executor.has_room_for(task.checkpoint.export)
        ]
        job = self._ledger.claim((*task.key, task.digest) for task in open_tasks)
        if job is None:
            return False
        checkpoint = next(task.checkpoint for task in open_tasks if task.key == (job.checkpoint, job.dataset))
        stack = ExitStack()
        try:
            self._lease(checkpoint)
            evaluation = stack.enter_context(self._begin(job, checkpoint))
        except UserError as error:
            stack.close()
            self._report_failure(job, str(error), job.seconds)
        else:
            self._active[_key(job)] = evaluation, stack
        return True

    def _lease(self, checkpoint: Checkpoint) -> None:
        if checkpoint.label not in self._leases:
            stack = ExitStack()
            stack.enter_context(held(checkpoint))
            self._leases[checkpoint.label] = stack

    def lease_only(self, labels: Collection[str]) -> None:
        """Let rotation have every checkpoint but these.

        Args:
            labels: of checkpoints that something is still to be done for, if only to choose the best.
        """
        for label in self._leases.keys() - set(labels):
            self._leases.pop(label).close()

    def _take_in(self, event: Event) -> None:
        entry = self._active.get((event.batch.checkpoint, event.batch.dataset, event.batch.digest))
        # else it comes from an attempt that has failed or was lost, maybe while the next one is under way
        if entry is not None and entry[0].claim == event.batch.claim:
            evaluation = entry[0]
            try:
                error = evaluation.handle(event)
            except OSError as failure:
                error = f"cannot write the results ({failure}); free disk space"
            if error is not None:
                self._fail(evaluation, error)

    def _end(self, evaluation: Evaluation) -> None:
        job, seconds = evaluation.job, evaluation.seconds
        if not self._still_has(evaluation):
            return
        try:
            self._complete(evaluation)
        except UserError as error:
            self._fail(evaluation, str(error))
            return
        self._drop(evaluation)
        if not self._ledger.finish(job, seconds):
            warn(f"another process has taken over {job.checkpoint} on {job.dataset}; it writes the same results")

    def _still_has(self, evaluation: Evaluation) -> bool:
        """Enter the time spent; leave a job that is another process's by now."""
        job = evaluation.job
        if self._ledger.renew(job, evaluation.seconds):
            return True
        warn(f"another process has taken over {job.checkpoint} on {job.dataset}; skipping it")
        self._drop(evaluation)
        return False

    def _fail(self, evaluation: Evaluation, error: str) -> None:
        seconds = evaluation.seconds
        self._drop(evaluation)
        self._report_failure(evaluation.job, error, seconds)

    def _report_failure(self, job: Job, error: str, seconds: dict[str, float]) -> None:
        self._ledger.fail(job, error, seconds)
        attempts = job.attempts + 1
        left = self._ledger.max_attempts - attempts
        again = f"next attempt in {self._ledger.pause_s(attempts):.0f} s, {left} left"
        then = again if left > 0 else "no attempts left; fix the cause and re-queue it with `retry`"
        warn(f"{job.checkpoint} on {job.dataset} failed: {error}; {then}")

    def _drop(self, evaluation: Evaluation) -> None:
        self._active.pop(_key(evaluation.job))[1].close()

    def _renew(self) -> None:
        if time.monotonic() - self._renewed < RENEWAL_S:
            return
        self._renewed = time.monotonic()
        for evaluation, _ in list(self._active.values()):
            self._still_has(evaluation)

    def release(self) -> None:
        """Give back every job that is not done, and every lease; what was answered and judged is kept."""
        left = [(evaluation.job, evaluation.seconds) for evaluation, _ in self._active.values()]
        while self._active:
            self._active.popitem()[1][1].close()
        for job, seconds in left:
            self._ledger.release(job, seconds)
        self.lease_only(())


def _key(job: Job) -> tuple[str, str, str]:
    return job.checkpoint, job.dataset, job.digest
