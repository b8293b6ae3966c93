"""Evaluates one model now."""

from __future__ import annotations

from collections.abc import Sequence

from eval_pipeline.executors.executor import require_engine
from eval_pipeline.flow.publish import Publisher
from eval_pipeline.flow.session import Session
from eval_pipeline.flow.work_off import work_off
from eval_pipeline.models.checkpoint import Checkpoint
from eval_pipeline.work.driver import Task
from verl_ext.console import print_summary, typed_path
from verl_ext.errors import UserError


def evaluate_now(session: Session, checkpoint: Checkpoint, tier: int) -> int:
    """Evaluate a model on the data sets up to a tier; what failed before is tried again.

    Args:
        session: of the place.
        checkpoint: the model.
        tier: 1, 2 or 3.

    Returns:
        0, or 1 when a data set failed.

    Raises:
        UserError: the tiers name no data set, a data set cannot be read, the place holds another model, another process
            evaluates this one there with other settings, or no work can be done at all.
    """
    _require_own_place(session, checkpoint)
    tasks = session.enter(checkpoint, tier)
    if not tasks:
        raise UserError(f"the recipe's tiers up to {tier} name no data set; set tiers.tier{tier}")
    keys = [task.key for task in tasks]
    session.ledger.retry(only=keys)
    if any(job.key in keys and job.state != "done" for job in session.ledger.jobs()):
        require_engine(session.recipe)
    published = work_off(session, _OneModel(session, tasks), Publisher(session, leads=False))
    failed = [job for job in session.ledger.jobs() if job.state == "failed" and job.key in keys]
    if failed:
        reasons = {job.dataset: (job.error or "").partition("\n")[0] for job in failed}
        print_summary(f"Failed: evaluation of {checkpoint.label}", reasons)
    elif checkpoint.label not in published:
        directory = session.place.directory_of(checkpoint.label)
        print_summary(f"Evaluated already: {checkpoint.label}", {"results": typed_path(directory)})
    return int(bool(failed))


def _require_own_place(session: Session, checkpoint: Checkpoint) -> None:
    others = {job.checkpoint for job in session.ledger.jobs()} - {checkpoint.label}
    if session.place.one_model and others:
        raise UserError(
            f"{session.place.root} holds the evaluation of {min(others)}; name another --output for {checkpoint.label}"
        )


class _OneModel:
    """An agenda that does not grow."""

    def __init__(self, session: Session, tasks: Sequence[Task]) -> None:
        self._session, self._tasks = session, tasks

    def tasks(self) -> Sequence[Task]:
        """See `Agenda`."""
        digests = {(job.checkpoint, job.dataset): job.digest for job in self._session.ledger.jobs()}
        for task in self._tasks:
            if digests[task.key] != task.digest:
                raise UserError(
                    f"another process is evaluating {task.checkpoint.label} on {task.dataset} with other settings; "
                    "wait until it ends, or name another directory with --output"
                )
        return self._tasks

    def is_over(self) -> bool:
        """See `Agenda`."""
        return not self._session.left_of(self._tasks)
