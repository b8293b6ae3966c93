"""Works on jobs until they have ended, publishing each checkpoint's figures when its last job has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from eval_pipeline.executors.executor import open_executor
from eval_pipeline.flow.complete import write_result
from eval_pipeline.flow.publish import Publisher
from eval_pipeline.flow.session import Session
from eval_pipeline.ledger.heartbeat import heartbeat
from eval_pipeline.work.driver import Driver, Task
from verl_ext.console import warn


class Agenda(Protocol):
    """What is to be done, which may grow while it is worked on."""

    def tasks(self) -> Sequence[Task]:
        """The jobs that are wanted now, those that have ended included, the most urgent first."""

    def is_over(self) -> bool:
        """Whether all have ended and none will come; asked after `tasks`."""


def work_off(session: Session, agenda: Agenda, publisher: Publisher) -> set[str]:
    """Work until nothing is left.

    Args:
        session: of the place.
        agenda: what is to be done.
        publisher: makes figures public.

    Returns:
        Labels of the checkpoints whose figures were published here.

    Raises:
        UserError: no work can be done at all, as where a Ray cluster cannot be reached.
    """
    published: set[str] = set()
    with open_executor(session.recipe) as executor, heartbeat(session.ledger):
        driver = Driver(session.ledger, executor, session.begin, lambda evaluation: write_result(session, evaluation))
        waiting = _Waiting(session)
        try:
            while True:
                wanted = agenda.tasks()
                published |= publisher.publish(wanted)
                driver.lease_only({task.checkpoint.label for task in session.left_of(wanted)})
                if agenda.is_over():
                    return published
                driver.turn(wanted)
                if driver.is_idle:
                    waiting.tell(wanted)
        finally:
            driver.release()


class _Waiting:
    """Says once what the work waits for."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._told: set[tuple[str, str, str | None]] = set()

    def tell(self, tasks: Sequence[Task]) -> None:
        wanted = {task.key: task.digest for task in tasks}
        for job in self._session.ledger.jobs():
            note = (job.checkpoint, job.dataset, job.worker)
            if note[:2] in wanted and note not in self._told:
                self._tell(note, wanted[note[:2]] == job.digest, job.state == "running")

    def _tell(self, note: tuple[str, str, str | None], is_same: bool, is_running: bool) -> None:
        checkpoint, dataset, worker = note
        if is_running:
            how = "" if is_same else " with other settings"
            warn(f"{worker} is evaluating {checkpoint} on {dataset}{how}; waiting for it")
        elif not is_same:
            warn(f"another process has queued {checkpoint} on {dataset} with other settings; waiting until it ends")
        else:
            return
        self._told.add(note)
