"""Answers and verdicts of one job on the disk, a line for each as it comes; a kill loses at most the line it tears."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from eval_pipeline.engines.answer import Answer
from eval_pipeline.judge.verdict import Verdict
from eval_pipeline.work.batch import Key
from verl_ext.metrics.atomic import replace_file
from verl_ext.metrics.lines import LineWriter, drop_torn_tail

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
        self.answers = read_rows(answers, lambda row: Answer(**row), lambda answer: answer.error is not None)
        self.verdicts = read_rows(
            verdicts, lambda row: Verdict(**row), lambda verdict: verdict.error_type == "api_error"
        )
        self._drop_orphans(verdicts)
        self._answers, self._verdicts = LineWriter(answers), LineWriter(verdicts)
        self._context = {
            "protocol": directory / f"protocol-{answers_digest[:16]}.json",
            "isolation": directory / f"isolation-{verdicts_digest[:16]}.json",
        }
        self.context: dict[str, Any] = {
            name: json.loads(path.read_text()) for name, path in self._context.items() if path.exists()
        }

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
    """The rows of a file by key, of several with one key the first that has not failed; a torn tail is cut off."""
    if not path.exists():
        return {}
    drop_torn_tail(path, lambda line: line.endswith(b"\n") and _parse(line) is not None)
    rows: dict[Key, T] = {}
    with open(path, "rb") as file:
        for row in filter(None, map(_parse, file)):
            key = (row.pop("problem_id"), row.pop("sample"))
            if key not in rows or has_failed(rows[key]):
                rows[key] = make(row)
    return rows


def _line(key: Key, content: dict[str, Any]) -> str:
    return json.dumps({"problem_id": key[0], "sample": key[1], **content})


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"problem_id", "sample"} <= row.keys() else None
