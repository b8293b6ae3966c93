"""Makes figures public once every job of a checkpoint has ended: files, the choice of the best, W&B, the terminal."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from eval_pipeline.figures.evaluated import EvaluatedModel
from eval_pipeline.figures.files import read_evaluation, write_evaluation
from eval_pipeline.figures.table import format_table
from eval_pipeline.flow.choose import Chooser
from eval_pipeline.flow.complete import RESULT_FILE
from eval_pipeline.flow.session import Session
from eval_pipeline.flow.track import track
from eval_pipeline.ledger.job import Job
from eval_pipeline.work.driver import Task
from verl_ext.errors import UserError
from verl_ext.tell import tell

LOCK_FILE = "publish.lock"
TRACK_LOCK_FILE = "track.lock"


class Publisher:
    """Publishes what has ended and was not published yet, also by a process that was killed in between.

    Args:
        session: of the place.
        leads: whether the best checkpoint is chosen by this session's settings, as `watch` does; else by those that it
            was last chosen by, so that a trial of other settings on one checkpoint does not decide.
    """

    def __init__(self, session: Session, leads: bool) -> None:
        self._session = session
        self._chooser = Chooser(session, leads)

    def publish(self, tasks: Sequence[Task]) -> set[str]:
        """Publish each checkpoint whose wanted jobs have all ended, with whatever else is done of it.

        Args:
            tasks: the jobs that are wanted.

        Returns:
            Labels of the checkpoints that were due.

        Raises:
            UserError: a file cannot be read or written.
        """
        left = {task.checkpoint.label for task in self._session.left_of(tasks)}
        ended = dict.fromkeys(task.checkpoint.label for task in tasks if task.checkpoint.label not in left)
        published = {label for label in ended if self._publish_if_due(label)}
        for label in ended if self._session.recipe.wandb else ():
            self._track_if_due(label)
        return published

    def _publish_if_due(self, label: str) -> bool:
        if not self._is_due(label):
            return False
        with _locked(self._session.place.root / LOCK_FILE):
            if not self._is_due(label):  # another watcher was faster
                return False
            jobs = self._ended(label)
            model = self._merge(label, (job for job in jobs if job.state == "done"))
            directory = self._session.place.directory_of(label)
            write_evaluation(directory, model)
            self._chooser.choose()
            tell(f"{label}\n{format_table(model.datasets)}\nwritten to {directory}")
            self._session.ledger.published.mark(label, _digest(jobs))
        return True

    def _track_if_due(self, label: str) -> None:
        """Send what is published to W&B, which may take minutes: nobody else must wait for that, or do it as well."""
        ledger = self._session.ledger
        if ledger.published.digest(label) in ("", None, ledger.published.tracked(label)):
            return
        with _locked(self._session.place.root / TRACK_LOCK_FILE, waits=False) as is_mine:
            digest = ledger.published.digest(label)
            if is_mine and digest != ledger.published.tracked(label):
                directory = self._session.place.directory_of(label)
                track(self._session, read_evaluation(directory), directory)
                ledger.published.mark_tracked(label, digest)

    def _is_due(self, label: str) -> bool:
        jobs = self._ended(label)
        if not any(job.state == "done" for job in jobs) or self._session.ledger.others_want_more(label):
            return False  # whoever wants more publishes all of it
        return self._session.ledger.published.digest(label) != _digest(jobs)

    def _ended(self, label: str) -> list[Job]:
        return [job for job in self._session.ledger.jobs() if job.checkpoint == label and job.has_ended]

    def _merge(self, label: str, jobs: Iterable[Job]) -> EvaluatedModel:
        weights = self._session.weights_of(label)
        models = [model for model in map(self._result_of, jobs) if model.weights == weights]
        first = models[0]
        datasets = {name: result for model in models for name, result in model.datasets.items()}
        return EvaluatedModel(first.label, first.step, first.checkpoint, first.export, weights, datasets)

    def _result_of(self, job: Job) -> EvaluatedModel:
        path = self._session.place.work_of(job.checkpoint, job.dataset) / RESULT_FILE
        try:
            return EvaluatedModel.of_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"cannot read {path} ({error!r}); delete {self._session.ledger.path} to have all judged anew"
            ) from error


def _digest(jobs: Sequence[Job]) -> str:
    content = sorted((job.dataset, job.digest, job.state) for job in jobs)
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@contextmanager
def _locked(path: Path, waits: bool = True) -> Iterator[bool]:
    """Hold the lock of a file, which ends with the process, however that ends; says whether it was to be had."""
    try:
        file = open(path, "a")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); make room or mend the directory") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
