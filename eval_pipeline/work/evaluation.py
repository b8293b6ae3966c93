"""One job under way: its batches, what has come of them, and its sum."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from eval_pipeline.config import EvalConfig
from eval_pipeline.ledger.job import Job
from eval_pipeline.models.checkpoint import Checkpoint
from eval_pipeline.problems.problem import Problem
from eval_pipeline.report.metrics import JudgedAnswer
from eval_pipeline.work.batch import (
    Answered,
    Batch,
    BatchId,
    Described,
    Event,
    Finished,
    Lost,
    Verdicted,
    batches_of,
    key_of,
)
from eval_pipeline.work.digests import Digests
from eval_pipeline.work.store import Store
from verl_ext.console import print_line, progress_bar, warn

MAX_LOSSES = 3
"""Workers that may die over one batch before its job has failed: perhaps the batch is what kills them."""

_CLAIMS = itertools.count(1)


class Evaluation:
    """One claim of one checkpoint on one data set, from what is on the disk already to the last verdict.

    Args:
        job: claimed by this process.
        checkpoint: the model.
        problems: of the data set.
        recipe: of the evaluation.
        digests: of the job.
        directory: of the job's files.

    Attributes:
        claim: number of the claim in this process, see `BatchId`.
    """

    def __init__(
        self,
        job: Job,
        checkpoint: Checkpoint,
        problems: Sequence[Problem],
        recipe: EvalConfig,
        digests: Digests,
        directory: Path,
    ) -> None:
        self.job, self.checkpoint, self._recipe = job, checkpoint, recipe
        self.claim = next(_CLAIMS)
        self._problems = {problem.problem_id: problem for problem in problems}
        self._batches = batches_of(problems, recipe.sampling, recipe.batch_size)
        self._keys = [key_of(request) for batch in self._batches for request in batch]
        self._store = Store(directory, digests.answers, digests.verdicts)
        self._waiting = deque(number for number, batch in enumerate(self._batches) if self._lacks_verdicts(batch))
        self._under_way: set[BatchId] = set()
        self._tried_again: set[int] = set()
        self._losses: Counter[int] = Counter()  # by batch: a node that dies takes many batches at once
        self._begun: float | None = None
        self._seconds_before = job.seconds
        self._phases: dict[str, float] = {}
        done, desc = len(self._store.verdicts), f"{checkpoint.label} {job.dataset}"
        self._tell_begin(done)
        self._bar = progress_bar(total=len(self._keys), initial=done, desc=desc, unit="answers")

    def _tell_begin(self, done: int) -> None:
        """Say what begins, as an engine loads for a while before the first answer."""
        what = f"Evaluating {self.checkpoint.label} on {self.job.dataset}: {len(self._keys) - done} answers to go"
        if self.checkpoint.export is not None:
            what += "; loading the model takes about 15 s, or a few minutes if it is large"
        print_line(f"{what}.", sys.stderr)

    def __enter__(self) -> Evaluation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._store.__exit__(kind, error, trace)

    def _lacks_verdicts(self, batch: Sequence[Any]) -> bool:
        return any(key_of(request) not in self._store.verdicts for request in batch)

    @property
    def has_waiting(self) -> bool:
        """Whether there is a batch to give out."""
        return bool(self._waiting)

    @property
    def is_complete(self) -> bool:
        """Whether every answer has its verdict."""
        return not self._waiting and not self._under_way

    def try_errors_again(self) -> bool:
        """Queue every `api_error` once more, because it says nothing about the model; only the first call does so.

        Returns:
            Whether anything was queued.
        """
        failed = {key for key, verdict in self._store.verdicts.items() if verdict.error_type == "api_error"}
        if self._tried_again or not failed:
            return False
        where = f"{self.checkpoint.label} on {self.job.dataset}"
        warn(f"{len(failed)} answers of {where} have no verdict (api_error); trying them once more")
        again = [number for number, batch in enumerate(self._batches) if not failed.isdisjoint(map(key_of, batch))]
        self._bar.update(-len(failed))
        self._store.drop(failed)
        self._tried_again.update(again)
        self._waiting.extend(again)
        return True

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds, former sessions included: of each phase summed over batches, and `active_s` in all.

        `active_s` counts from when the engine is ready, or kept answers go to the judge.
        """
        active = 0.0 if self._begun is None else time.monotonic() - self._begun
        now = {**self._phases, "active_s": active}
        return {name: now.get(name, 0.0) + self._seconds_before.get(name, 0.0) for name in now | self._seconds_before}

    @property
    def isolation(self) -> str:
        """Level that the judge used."""
        return self._store.context["isolation"]

    @property
    def protocol(self) -> dict[str, Any]:
        """Of the engine."""
        return self._store.context["protocol"]

    def next_batch(self) -> Batch:
        """The next batch to give out."""
        number = self._waiting.popleft()
        requests = self._batches[number]
        if number in self._tried_again:  # only what failed: the batch is not answered whole again for its sake
            requests = tuple(request for request in requests if key_of(request) not in self._store.verdicts)
        keys = {key_of(request) for request in requests}
        batch = Batch(
            id=BatchId(self.job.checkpoint, self.job.dataset, self.job.digest, self.claim, number),
            export=self.checkpoint.export,
            problems={key[0]: self._problems[key[0]] for key in keys},
            requests=requests,
            sampling=self._recipe.sampling,
            answers={key: self._store.answers[key] for key in keys & self._store.answers.keys()},
            judged=frozenset(keys & self._store.verdicts.keys()),
        )
        self._under_way.add(batch.id)
        return batch

    def handle(self, event: Event) -> str | None:
        """Keep what an event brings.

        Returns:
            Why the whole job has failed, or None.

        Raises:
            OSError: the disk is full.
        """
        if isinstance(event, Described):
            self._begun = self._begun or time.monotonic()
            self._store.add_context(event.context)
        elif isinstance(event, Answered):
            self._store.add_answer(event.key, event.answer)
        elif isinstance(event, Verdicted):
            self._bar.update(event.key not in self._store.verdicts)
            self._store.add_verdict(event.key, event.verdict)
        elif isinstance(event, Finished):
            self._finish(event)
        elif isinstance(event, Lost):
            return self._lose(event)
        else:
            return event.error
        return None

    def _finish(self, event: Finished) -> None:
        self._under_way.discard(event.batch)
        for name, value in event.seconds.items():
            self._phases[name] = self._phases.get(name, 0.0) + value

    def _lose(self, event: Lost) -> str | None:
        self._losses[event.batch.number] += 1
        if self._losses[event.batch.number] >= MAX_LOSSES:
            return f"{event.reason}; {MAX_LOSSES} workers have died while working on the same problems"
        self._under_way.discard(event.batch)
        self._waiting.appendleft(event.batch.number)
        return None

    def judged(self) -> list[JudgedAnswer]:
        """All of it, in the order of the problems."""
        return [
            JudgedAnswer(
                self._problems[problem_id],
                sample,
                self._store.answers[problem_id, sample],
                self._store.verdicts[problem_id, sample],
            )
            for problem_id, sample in self._keys
        ]
