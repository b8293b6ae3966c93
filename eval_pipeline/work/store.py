"""Answers and verdicts of one job on the disk, a line for each as it comes; a kill loses at most the line it tears."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from eval_pipeline.engines.answer import Answer
from eval_pipeline.judge import ERROR_TYPES, Verdict
from eval_pipeline.work.batch import Key
from verl_ext.console import warn
from verl_ext.files import LineWriter, drop_torn_tail, parse_json, replace_file

T = TypeVar("T")


class Store:
    """What there is of a job; a context manager that appends.

    Args:
        directory: of the job; made when missing.
        answers_digest: of what decides the answers.
        verdicts_digest: of what decides the verdicts besides.

    Attributes:
        answers: by key.
        verdicts: by key.
        context: how they came about: `protocol` of the engine, with the answers; `isolation`, with the verdicts.
    """

    def __init__(self, directory: Path, answers_digest: str, verdicts_digest: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        answers, verdicts = (
            directory / f"{name}-{digest[:16]}.jsonl"
            for name, digest in (("answers", answers_digest), ("verdicts", verdicts_digest))
        )
        self.answers = read_rows(answers, _answer_of, lambda answer: answer.error is not None)
        self.verdicts = read_rows(verdicts, _verdict_of, lambda verdict: verdict.error_type == "api_error")
        self._context = {
            "protocol": directory / f"protocol-{answers_digest[:16]}.json",
            "isolation": directory / f"isolation-{verdicts_digest[:16]}.json",
        }
        self.context: dict[str, Any] = {}
        self._read_context("protocol", dict, answers, self.answers)
        self._read_context("isolation", str, verdicts, self.verdicts)
        self._drop_orphans(verdicts)
        self._answers, self._verdicts = LineWriter(answers), LineWriter(verdicts)

    def _read_context(self, name: str, kind: type, path: Path, rows: dict[Key, Any]) -> None:
        """Read how the rows of a file came about; without that they cannot be used, and are discarded."""
        where = self._context[name]
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
        """Take out verdicts whose answer is lost and will be drawn anew; only a crash of the machine leaves such."""
        orphans = self.verdicts.keys() - self.answers.keys()
        if orphans:
            self.verdicts = {key: verdict for key, verdict in self.verdicts.items() if key not in orphans}
            replace_file(path, (_line(key, asdict(verdict)) + "\n" for key, verdict in self.verdicts.items()))

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answers.close()
        self._verdicts.close()

    def add_answer(self, key: Key, answer: Answer) -> None:
        """Keep an answer, unless there is one.

        Raises:
            OSError: the disk is full.
        """
        if key not in self.answers:
            self._answers.write(_line(key, asdict(answer)))
            self.answers[key] = answer

    def drop(self, keys: Collection[Key]) -> None:
        """Forget verdicts that are none, and with them answers that are none; what is added then takes their place."""
        for key in keys:
            del self.verdicts[key]
            if self.answers[key].error is not None:
                del self.answers[key]

    def add_context(self, context: dict[str, Any]) -> None:
        """Keep how answers and verdicts came about; raises as `add_answer`."""
        for name, value in context.items():
            if name not in self.context or self.context[name] != value:
                replace_file(self._context[name], [json.dumps(value)])
                self.context[name] = value

    def add_verdict(self, key: Key, verdict: Verdict) -> None:
        """Keep a verdict, unless there is one; raises as `add_answer`."""
        if key not in self.verdicts:
            self._verdicts.write(_line(key, asdict(verdict)))
            self.verdicts[key] = verdict


def read_rows(path: Path, make: Callable[[dict[str, Any]], T], has_failed: Callable[[T], bool]) -> dict[Key, T]:
    """The rows of a file by key, of several with one key the first that has not failed; a torn tail is cut off.

    Args:
        path: JSON Lines; there may be no such file.
        make: makes a value of a row without its key. Rows for which it raises `TypeError` or `ValueError`, as those
            that another version wrote, are skipped with one warning.
        has_failed: whether a value gives way to a later one.
    """
    if not path.exists():
        return {}
    drop_torn_tail(path, lambda line: line.endswith(b"\n") and _parse(line) is not None)
    rows: dict[Key, T] = {}
    num_skipped = 0
    with open(path, "rb") as file:
        for row in filter(None, map(_parse, file)):
            try:
                key, value = _key_of(row), make(row)
            except (TypeError, ValueError):
                num_skipped += 1
                continue
            if key not in rows or has_failed(rows[key]):
                rows[key] = value
    if num_skipped:
        warn(f"{path}: skipped {num_skipped} rows that this version cannot read; they are computed again")
    return rows


def _key_of(row: dict[str, Any]) -> Key:
    """The key of a row, which is taken out of it."""
    problem_id, sample = row.pop("problem_id", None), row.pop("sample", None)
    if not isinstance(problem_id, str) or not isinstance(sample, int):
        raise TypeError("a row without its key")
    return problem_id, sample


def _answer_of(row: dict[str, Any]) -> Answer:
    answer = Answer(**row)
    numbers = isinstance(answer.num_tokens, int) and isinstance(answer.truncated, bool)
    if not numbers or not isinstance(answer.text, str) or not isinstance(answer.error, str | None):
        raise TypeError("a field of another type")
    return answer


def _verdict_of(row: dict[str, Any]) -> Verdict:
    verdict = Verdict(**row)
    numbers = all(isinstance(each, int) for each in (verdict.num_passed, verdict.num_tests))
    if not numbers or not isinstance(verdict.judge_time, int | float) or not isinstance(verdict.message, str):
        raise TypeError("a field of another type")
    if verdict.error_type not in ERROR_TYPES:
        raise ValueError("an error type that this version does not have")
    return verdict


def _line(key: Key, content: dict[str, Any]) -> str:
    return json.dumps({"problem_id": key[0], "sample": key[1], **content})


def _parse(line: bytes) -> dict[str, Any] | None:
    """A row; None for what is left of one that a kill or a crash tore."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and row else None
