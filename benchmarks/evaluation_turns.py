"""One worker of the evaluation, measured while it generates, while it judges, and while it does both."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.processor_time import ProcessorTime
from eval_pipeline.config import EvalConfig, SamplingConfig
from eval_pipeline.engines.base import Engine, GeneratedAnswer, GenerateRequest
from eval_pipeline.problems.dataset import load_problems
from eval_pipeline.worker import (
    AnswerJudged,
    AnswerKey,
    AnswerReceived,
    Batch,
    BatchFailed,
    BatchId,
    EvalWorker,
    Event,
    key_of,
    split_into_batches,
)
from verl_ext.errors import UserError

VARIANTS = ("generated", "canonical")
Turn = dict[str, float]


class ReplacingEngine(Engine):
    """An engine whose answers have other texts; answers to problems without a text stay.

    Args:
        engine: a started engine.
        texts: by `problem_id`.
    """

    def __init__(self, engine: Engine, texts: Mapping[str, str]) -> None:
        self._engine, self._texts = engine, texts
        self.protocol, self.seconds = engine.protocol, engine.seconds

    def __enter__(self) -> ReplacingEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass  # the worker closes the engine

    def answers(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig
    ) -> Iterator[tuple[GenerateRequest, GeneratedAnswer]]:
        """See `Engine`."""
        for request, answer in self._engine.answers(requests, sampling):
            text = self._texts.get(request.problem_id)
            yield request, answer if text is None else replace(answer, text=text, error=None)


class ReplacingWorker(EvalWorker):
    """A worker that submits other texts to the judge, each when the answer that it replaces is generated.

    Attributes:
        texts: by `problem_id`; answers to problems without a text stay.
    """

    texts: Mapping[str, str] = {}

    def _open_engine(self, export: Path | None) -> Engine:
        return ReplacingEngine(super()._open_engine(export), self.texts)


class Events:
    """Receives what a worker emits in one turn.

    Raises:
        UserError: the batch fails.
    """

    def __init__(self) -> None:
        self.answers: dict[AnswerKey, GeneratedAnswer] = {}
        self.error_types: Counter[str] = Counter()
        self.last_answer = time.perf_counter()
        self.failure: str | None = None

    def take(self, event: Event) -> None:
        """May be called from several threads, like the pipe to a driver."""
        if isinstance(event, AnswerReceived):
            self.answers[event.key] = event.answer
            self.last_answer = time.perf_counter()
        elif isinstance(event, AnswerJudged):
            self.error_types[event.verdict.error_type] += 1
        elif isinstance(event, BatchFailed):
            self.failure = event.error


class Turns:
    """A context in which turns are taken; engine and judge stay from one to the next.

    Args:
        recipe: with HumanEval; all problems are one batch, which the recipe's `batch_size` must allow.
        export: Hugging Face model directory.
    """

    def __init__(self, recipe: EvalConfig, export: Path) -> None:
        problems = load_problems(recipe.sources["humaneval"])
        self.num_problems = len(problems)
        self.kinds = ("generation", *(f"{part} {variant}" for part in ("judging", "whole") for variant in VARIANTS))
        self._canonical = {each.problem_id: f"```python\n{each.canonical_solution}\n```" for each in problems}
        batches = split_into_batches(problems, recipe.sampling, recipe.batch_size)
        if len(batches) != 1:
            raise UserError(f"batch_size is {recipe.batch_size}; at least {len(problems)} make all problems one batch")
        by_id = {problem.problem_id: problem for problem in problems}
        self._batch = Batch(BatchId(claim=1, number=0), export, by_id, batches[0], recipe.sampling)
        self._recipe = recipe
        self._answers: dict[AnswerKey, GeneratedAnswer] = {}
        self._error_types: dict[str, dict[str, int]] = {}

    def __enter__(self) -> Turns:
        """Start judge and engine, and draw the answers once."""
        self._clock = ProcessorTime()  # before the processes that it is to count
        self._worker = ReplacingWorker(self._recipe)
        self.take("generation")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End both."""
        self._worker.__exit__(kind, error, trace)

    def take(self, kind: str) -> Turn:
        """Take one turn: its wall-clock and processor seconds, and those after its last answer.

        Args:
            kind: one of `kinds`.

        Raises:
            UserError: the worker fails.
        """
        part, _, variant = kind.partition(" ")
        self._worker.texts = self._canonical if variant == "canonical" else {}
        batch, events = self._batch_for(part, variant), Events()
        cpu, begun = self._clock.seconds(), time.perf_counter()
        self._worker.run(batch, events.take)
        end = time.perf_counter()
        turn = {"wall_s": end - begun, "cpu_s": self._clock.seconds() - cpu}
        if events.failure is not None:
            raise UserError(f"{kind}: {events.failure}")
        if part == "generation":
            self._answers = events.answers
        else:
            self._error_types[variant] = dict(events.error_types)
        return turn | ({"tail_s": end - events.last_answer} if part == "whole" else {})

    def _batch_for(self, part: str, variant: str) -> Batch:
        """The batch as an evaluation would give it out, with what is there already."""
        if part == "generation":
            return replace(self._batch, judged=frozenset(map(key_of, self._batch.requests)))
        if part == "whole":
            return self._batch
        texts = self._canonical if variant == "canonical" else {}
        answers = {key: replace(each, text=texts.get(key[0], each.text)) for key, each in self._answers.items()}
        return replace(self._batch, answers=answers)

    def about(self) -> dict[str, Any]:
        """What was drawn and judged."""
        lengths = [answer.num_tokens for answer in self._answers.values()]
        drawn = {"mean_tokens": sum(lengths) / len(lengths), "max_tokens": max(lengths)}
        drawn["truncated"] = sum(answer.truncated for answer in self._answers.values())
        return {**drawn, "verdicts": self._error_types}
