"""A claimed job: its batches, and its answers and verdicts on disk."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from eval_pipeline.checkpoints import EvalCheckpoint
from eval_pipeline.config import EvalConfig
from eval_pipeline.engines import GeneratedAnswer
from eval_pipeline.jobs import Job
from eval_pipeline.judge import Verdict
from eval_pipeline.problems.problem import Problem
from eval_pipeline.recipe import EvalDigests
from eval_pipeline.report.metrics import JudgedAnswer
from eval_pipeline.worker import (
    MAX_LOSSES,
    AnswerJudged,
    AnswerKey,
    AnswerReceived,
    Batch,
    BatchFinished,
    BatchId,
    BatchLost,
    BatchStarted,
    Event,
    key_of,
    split_into_batches,
)
from verl_ext.config.schema import fits
from verl_ext.console import print_line, progress_bar, warn
from verl_ext.files import LineWriter, drop_torn_tail, parse_json, replace_file

T = TypeVar("T")
_CLAIMS = itertools.count(1)


class ActiveJob:
    """A job that this process has claimed, from the stored answers to the last verdict. `close` closes its files.

    Attributes:
        claim: sequence number of the claim in this process.
    """

    def __init__(
        self,
        job: Job,
        checkpoint: EvalCheckpoint,
        problems: Sequence[Problem],
        config: EvalConfig,
        digests: EvalDigests,
        directory: Path,
    ) -> None:
        self.job, self.checkpoint, self._config = job, checkpoint, config
        self.claim = next(_CLAIMS)
        self._problems = {problem.problem_id: problem for problem in problems}
        self._batches = split_into_batches(problems, config.sampling, config.batch_size)
        self._keys = [key_of(request) for batch in self._batches for request in batch]
        self._weights = digests.model
        self._store = AnswerStore(directory, digests.answers, digests.verdicts)
        self._waiting = deque(
            number
            for number, batch in enumerate(self._batches)
            if any(key_of(request) not in self._store.verdicts for request in batch)
        )
        self._submitted: set[BatchId] = set()
        self._retried: set[int] = set()
        self._losses: Counter[int] = Counter()  # by batch, because a dying node loses many batches at once
        self._started: float | None = None
        self._phases: dict[str, float] = defaultdict(float)
        num_done, desc = len(self._store.verdicts), f"{job.checkpoint} {job.dataset}"
        num_left = len(self._keys) - num_done + len(self._api_errors())  # these are retried at the end
        what = f"Evaluating {job}: {num_left} {'answer' if num_left == 1 else 'answers'} remaining"
        if checkpoint.export is not None:
            what += "; loading the model takes about 15 s, or a few minutes if it is large"
        print_line(f"{what}.", sys.stderr)
        self._bar = progress_bar(total=len(self._keys), initial=num_done, desc=desc, unit="answers")

    def close(self) -> None:
        """Close the files and the progress bar."""
        self._bar.close()
        self._store.close()

    @property
    def has_batches(self) -> bool:
        """Whether a batch is waiting for a worker."""
        return bool(self._waiting)

    @property
    def is_complete(self) -> bool:
        """Whether every answer has a verdict."""
        return not self._waiting and not self._submitted

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds including previous claims: each phase, summed over batches, and `active_s` in total.

        `active_s` starts when the engine is ready, or when stored answers go to the judge.
        """
        active = 0.0 if self._started is None else time.monotonic() - self._started
        now, before = {**self._phases, "active_s": active}, self.job.seconds
        return {name: now.get(name, 0.0) + before.get(name, 0.0) for name in now | before}

    @property
    def context(self) -> dict[str, Any]:
        """How the answers and verdicts were obtained; see `AnswerStore`."""
        return self._store.context

    def next_batch(self) -> Batch:
        """Take the next batch from the queue."""
        number = self._waiting.popleft()
        requests = self._batches[number]
        if number in self._retried:  # generate only the failed answers again
            requests = tuple(request for request in requests if key_of(request) not in self._store.verdicts)
        keys = {key_of(request) for request in requests}
        batch = Batch(
            id=BatchId(self.claim, number),
            export=self.checkpoint.export,
            problems={key[0]: self._problems[key[0]] for key in keys},
            requests=requests,
            sampling=self._config.sampling,
            answers={key: self._store.answers[key] for key in keys & self._store.answers.keys()},
            judged=frozenset(keys & self._store.verdicts.keys()),
            weights=self._weights,
        )
        self._submitted.add(batch.id)
        return batch

    def handle(self, event: Event) -> str | None:
        """Process an event of one of the job's batches.

        Returns:
            Why the attempt failed, or None.

        Raises:
            OSError: the disk is full.
        """
        match event:
            case BatchStarted(context=context):
                if self._started is None:
                    self._started = time.monotonic()
                    self._bar.unpause()  # the time left does not count loading the model
                self._store.add_context(context)
            case AnswerReceived(key=key, answer=answer):
                self._store.add_answer(key, answer)
            case AnswerJudged(key=key, verdict=verdict):
                self._bar.update(key not in self._store.verdicts)
                self._store.add_verdict(key, verdict)
            case BatchFinished(batch=batch, seconds=seconds):
                self._submitted.discard(batch)
                for phase, value in seconds.items():
                    self._phases[phase] += value
            case BatchLost(batch=batch, reason=reason):
                self._losses[batch.number] += 1
                if self._losses[batch.number] >= MAX_LOSSES:
                    return f"{reason}; {MAX_LOSSES} workers or engines have died while working on the same problems"
                self._submitted.discard(batch)
                self._waiting.appendleft(batch.number)
            case _:
                return event.error
        return None

    def retry_api_errors(self) -> bool:
        """Re-queue every `api_error`, which says nothing about the model. Only the first call does so.

        Returns:
            Whether anything was queued.
        """
        failed = self._api_errors()
        if self._retried or not failed:
            return False
        warn(f"{len(failed)} answers of {self.job} have no verdict (api_error); retrying them once")
        numbers = [number for number, batch in enumerate(self._batches) if not failed.isdisjoint(map(key_of, batch))]
        self._bar.update(-len(failed))
        self._store.drop(failed)
        self._retried.update(numbers)
        self._waiting.extend(numbers)
        return True

    def _api_errors(self) -> set[AnswerKey]:
        return {key for key, verdict in self._store.verdicts.items() if verdict.error_type == "api_error"}

    def judged_answers(self) -> list[JudgedAnswer]:
        """All answers with their verdicts, ordered by problem."""
        answers, verdicts = self._store.answers, self._store.verdicts
        return [JudgedAnswer(self._problems[key[0]], key[1], answers[key], verdicts[key]) for key in self._keys]


class AnswerStore:
    """Stores a job's answers and verdicts on disk as they arrive, one per line. A kill loses at most one line.

    Args:
        directory: the job's directory; created if missing.
        answers_digest: digest of everything that affects the answers.
        verdicts_digest: digest of everything that affects the verdicts.

    Attributes:
        answers: stored answers by key.
        verdicts: stored verdicts by key.
        context: how they were obtained: the engine's `protocol` for answers, `isolation` for verdicts.
    """

    def __init__(self, directory: Path, answers_digest: str, verdicts_digest: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        answers = directory / f"answers-{answers_digest[:16]}.jsonl"
        verdicts = directory / f"verdicts-{verdicts_digest[:16]}.jsonl"
        self.answers = read_rows(answers, GeneratedAnswer, lambda answer: answer.error is not None)
        self.verdicts = read_rows(verdicts, Verdict, lambda verdict: verdict.error_type == "api_error")
        self._context_files = {
            "protocol": directory / f"protocol-{answers_digest[:16]}.json",
            "isolation": directory / f"isolation-{verdicts_digest[:16]}.json",
        }
        self.context: dict[str, Any] = {}
        self._read_context("protocol", dict, answers, self.answers)
        self._read_context("isolation", str, verdicts, self.verdicts)
        self._drop_orphans(verdicts)
        self._answers, self._verdicts = LineWriter(answers), LineWriter(verdicts)

    def _read_context(self, name: str, kind: type, path: Path, rows: dict[AnswerKey, Any]) -> None:
        """Read how the rows of a file were obtained. If that is unknown, discard the rows."""
        where = self._context_files[name]
        try:
            value = parse_json(where.read_bytes())
        except (FileNotFoundError, ValueError):
            value = None
        if isinstance(value, kind):
            self.context[name] = value
        elif rows:
            why = f"{where} is missing or unreadable"
            warn(f"{why}, so the {len(rows)} rows of {path.name} are discarded and computed again")
            rows.clear()
            replace_file(path, ())

    def _drop_orphans(self, path: Path) -> None:
        """Drop verdicts without an answer, which only a machine crash leaves. The answers are generated again."""
        orphans = self.verdicts.keys() - self.answers.keys()
        if orphans:
            self.verdicts = {key: verdict for key, verdict in self.verdicts.items() if key not in orphans}
            replace_file(path, (_line(key, verdict) + "\n" for key, verdict in self.verdicts.items()))

    def close(self) -> None:
        """Close the files."""
        self._answers.close()
        self._verdicts.close()

    def add_answer(self, key: AnswerKey, answer: GeneratedAnswer) -> None:
        """Store an answer, unless there is one.

        Raises:
            OSError: the disk is full.
        """
        if key not in self.answers:
            self._answers.write(_line(key, answer))
            self.answers[key] = answer

    def add_verdict(self, key: AnswerKey, verdict: Verdict) -> None:
        """Store a verdict, unless there is one. Raises like `add_answer`."""
        if key not in self.verdicts:
            self._verdicts.write(_line(key, verdict))
            self.verdicts[key] = verdict

    def add_context(self, context: dict[str, Any]) -> None:
        """Store how answers and verdicts are obtained. Raises like `add_answer`."""
        for name, value in context.items():
            if name not in self.context or self.context[name] != value:
                replace_file(self._context_files[name], [json.dumps(value)])
                self.context[name] = value

    def drop(self, keys: Collection[AnswerKey]) -> None:
        """Forget failed verdicts and the failed answers behind them; new ones will replace them."""
        for key in keys:
            del self.verdicts[key]
            if self.answers[key].error is not None:
                del self.answers[key]


def _line(key: AnswerKey, value: GeneratedAnswer | Verdict) -> str:
    return json.dumps({"problem_id": key[0], "sample": key[1], **asdict(value)})


def read_rows(path: Path, kind: type[T], has_failed: Callable[[T], bool]) -> dict[AnswerKey, T]:
    """Read the rows of a file by key. If several rows have the same key, the first one that has not failed counts.

    Args:
        path: JSON Lines; a missing file is empty, and a torn last line is cut off.
        kind: dataclass of a row without its key. Rows that do not fit, for example from another version, are skipped
            with one warning.
        has_failed: whether a later value replaces this one.
    """
    if not path.exists():
        return {}
    drop_torn_tail(path, lambda line: line.endswith(b"\n") and _parse_row(line) is not None)
    hints = get_type_hints(kind)
    rows: dict[AnswerKey, T] = {}
    num_skipped = 0
    with open(path, "rb") as file:
        for row in filter(None, map(_parse_row, file)):
            try:
                key, value = _from_row(row, kind, hints)
            except TypeError:
                num_skipped += 1
                continue
            if key not in rows or has_failed(rows[key]):
                rows[key] = value
    if num_skipped:
        warn(f"{path}: skipped {num_skipped} rows that this version cannot read; they are computed again")
    return rows


def _parse_row(line: bytes) -> dict[str, Any] | None:
    """Parse a row; None if it was only partly written."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and row else None


def _from_row(row: dict[str, Any], kind: type[T], hints: Mapping[str, Any]) -> tuple[AnswerKey, T]:
    problem_id, sample = row.pop("problem_id", None), row.pop("sample", None)
    value = kind(**row)  # refuses missing and unknown fields
    has_key = isinstance(problem_id, str) and isinstance(sample, int)
    if not has_key or not all(fits(getattr(value, name), hint, quoted=True) for name, hint in hints.items()):
        raise TypeError("a field has the wrong type")
    return (problem_id, sample), value
