"""Makes figures public once every job of a checkpoint has ended: files, the choice of the best, W&B, the terminal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from eval_pipeline.flow.choose import Chooser
from eval_pipeline.flow.session import Session
from eval_pipeline.flow.track import track
from eval_pipeline.ledger.job import Job
from eval_pipeline.report.report import format_table
from eval_pipeline.report.results import EvaluatedModel, read_evaluation, write_evaluation
from eval_pipeline.work.driver import Task
from verl_ext.commands import program
from verl_ext.console import print_summary, typed_path, warn
from verl_ext.errors import UserError
from verl_ext.files import file_lock, parse_json

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
        self._seen: dict[str, str] = {}

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
        for label in left & self._seen.keys():
            del self._seen[label]  # due again, with the digest that it had
        ended = dict.fromkeys(task.checkpoint.label for task in tasks if task.checkpoint.label not in left)
        digests = self._digests()
        new = [label for label in ended if self._seen.get(label) != digests[label]]
        return {label for label in new if self._take(label, digests[label])}

    def _take(self, label: str, digest: str) -> bool:
        if self._session.ledger.others_want_more(label):
            return False  # whoever wants more publishes all of it
        published = self._publish_if_due(label)
        if not self._session.recipe.wandb or self._track_if_due(label):
            self._seen[label] = digest
        return published

    def _digests(self) -> dict[str, str]:
        """By label what there is to be published, for a look that costs little."""
        jobs: dict[str, list[Job]] = {}
        for job in self._session.ledger.jobs():
            jobs.setdefault(job.checkpoint, []).append(job)
        return {label: _digest(its) for label, its in jobs.items()}

    def _publish_if_due(self, label: str) -> bool:
        ledger, place = self._session.ledger, self._session.place
        directory = place.directory_of(label)
        with file_lock(place.root / LOCK_FILE):
            jobs = [job for job in ledger.jobs() if job.checkpoint == label]
            results = self._results(label, jobs)
            if not results or ledger.published.digest(label) == _digest(jobs):
                return False  # all has failed, or another watcher was faster
            model = _merge(results)
            write_evaluation(directory, model)
            self._chooser.choose()
            for name, num in model.incomplete.items():
                warn(
                    f"{label} on {name} is incomplete: {num} answers have no verdict (api_error) and count as wrong; "
                    f"fix the cause, type `{program('eval')} retry {typed_path(place.run_dir or place.root)}`, "
                    "and evaluate again"
                )
            rows = {"results": typed_path(directory)}
            print_summary(f"Evaluated: {label}", rows, table=format_table(model.datasets))
            ledger.published.mark(label, _digest(jobs))
        return True

    def _track_if_due(self, label: str) -> bool:
        """Send what is published to W&B, which may take minutes: nobody else must wait for that, or do it as well.

        Returns:
            Whether nothing is left to send; else another process is at it, which may die over it.
        """
        published = self._session.ledger.published
        if published.digest(label) in ("", None, published.tracked(label)):
            return True
        with file_lock(self._session.place.root / TRACK_LOCK_FILE, wait=False) as is_mine:
            digest = published.digest(label)
            if is_mine and digest is not None and digest != published.tracked(label):
                directory = self._session.place.directory_of(label)
                track(self._session, read_evaluation(directory), directory)
                published.mark_tracked(label, digest)
            return is_mine

    def _results(self, label: str, jobs: Iterable[Job]) -> list[EvaluatedModel]:
        """What is done of a checkpoint with the weights that it has now."""
        weights = self._session.weights_of(label)
        results = [self._result_of(job) for job in jobs if job.state == "done"]
        return [result for result in results if result.weights == weights]

    def _result_of(self, job: Job) -> EvaluatedModel:
        path = self._session.place.result_of(job.checkpoint, job.dataset)
        try:
            return EvaluatedModel.from_json(parse_json(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"cannot read {path} ({error!r}); delete {self._session.ledger.path} to judge everything again"
            ) from error


def _merge(results: Sequence[EvaluatedModel]) -> EvaluatedModel:
    """One model's results on several data sets, as one."""
    datasets = {name: result for model in results for name, result in model.datasets.items()}
    return replace(results[0], datasets=datasets)


def _digest(jobs: Sequence[Job]) -> str:
    content = sorted((job.dataset, job.digest, job.state) for job in jobs if job.has_ended)
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
