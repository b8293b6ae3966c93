"""Answers and judges batches; lives in a process of its own, or in a Ray actor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

from eval_pipeline.config import EvalConfig
from eval_pipeline.engines.answer import Answer, Request
from eval_pipeline.engines.engine import Engine, open_engine
from eval_pipeline.judge import JudgeClient, Submission, Verdict
from eval_pipeline.problems.extract import extract_program
from eval_pipeline.work.batch import Answered, Batch, Described, Event, Failed, Finished, Key, Verdicted, key_of
from verl_ext.errors import UserError, one_line

Emit = Callable[[Event], None]


class Worker:
    """An engine and a judge.

    Two batches may be under way at a time, each in a thread of its caller's: while the answers to one are still being
    judged, the engine begins with the next.

    Args:
        recipe: of the evaluation.
    """

    def __init__(self, recipe: EvalConfig) -> None:
        self._recipe = recipe
        self._engine: Engine | None = None
        self._export: Path | None = None
        self._engine_lock = threading.Lock()
        self._judge = JudgeClient(recipe.judge)
        self._judge.__enter__()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_engine()
        self._judge.__exit__(None, None, None)

    def work(self, batch: Batch, emit: Emit) -> None:
        """Do a batch.

        Args:
            batch: what to do.
            emit: receives every answer and verdict as it comes, and at the end `Finished` or `Failed`; may be called
                from several threads.
        """
        try:
            emit(self._work(batch, emit))
        except UserError as error:
            emit(Failed(batch.id, str(error)))
        except Exception as error:  # whatever it is, the driver has to know; the worker can go on with another batch
            emit(Failed(batch.id, one_line(error)))

    def _work(self, batch: Batch, emit: Emit) -> Finished:
        judging = _Judging(self._judge, batch, emit)
        seconds: dict[str, float] = {}
        if batch.answers:
            self._describe(batch, emit)
        for key, answer in batch.answers.items():
            judging.submit(key, answer)
        if batch.needs_engine:
            with self._engine_lock:
                seconds = self._answer(batch, emit, judging)
        seconds["judge_s"] = judging.wait()
        return Finished(batch.id, seconds)

    def _describe(self, batch: Batch, emit: Emit, **further: object) -> None:
        emit(Described(batch.id, {"isolation": self._judge.isolation, **further}))

    def _answer(self, batch: Batch, emit: Emit, judging: _Judging) -> dict[str, float]:
        """Have the engine answer; returns the seconds this took, by phase."""
        known = self._engine
        try:
            engine = self._engine_for(batch.export)
            before = dict(engine.seconds) if engine is known else {}
            self._describe(batch, emit, protocol=dict(engine.protocol))
            for request, answer in engine.answers(batch.requests, batch.sampling):
                self._receive(request, self.taken(request, answer), batch, emit, judging)
        except BaseException:
            self._close_engine()  # the next batch begins with a new one
            raise
        return {name: value - before.get(name, 0.0) for name, value in engine.seconds.items()}

    def taken(self, request: Request, answer: Answer) -> Answer:
        """What is kept and judged where the engine gave `answer`: that itself."""
        return answer

    @staticmethod
    def _receive(request: Request, answer: Answer, batch: Batch, emit: Emit, judging: _Judging) -> None:
        key = key_of(request)
        if key not in batch.answers:
            emit(Answered(batch.id, key, answer))
            judging.submit(key, answer)

    def _engine_for(self, export: Path | None) -> Engine:
        if self._engine is None or self._export != export:
            self._close_engine()
            engine = open_engine(self._recipe.engine, export)
            self._engine, self._export = engine.__enter__(), export
        return self._engine

    def _close_engine(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.__exit__(None, None, None)


class _Judging:
    """The verdicts of one batch that are under way."""

    def __init__(self, judge: JudgeClient, batch: Batch, emit: Emit) -> None:
        self._judge, self._batch, self._emit = judge, batch, emit
        self._num_submitted = 0
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._started = time.monotonic()

    def submit(self, key: Key, answer: Answer) -> None:
        """Have an answer judged, unless it was."""
        if key in self._batch.judged:
            return
        if not self._num_submitted:
            self._started = time.monotonic()
        self._num_submitted += 1
        problem = self._batch.problems[key[0]]
        program = extract_program(problem, answer.text)
        future = self._judge.submit(Submission(program, problem.tests, error=answer.error))
        future.add_done_callback(lambda done: self._forward(key, done))

    def _forward(self, key: Key, done: Future[Verdict]) -> None:
        if done.exception() is None:
            self._emit(Verdicted(self._batch.id, key, done.result()))
        self._ended.put(done.exception())

    def wait(self) -> float:
        """Wait until all are forwarded; returns the seconds from the first submission, and raises what failed."""
        for _ in range(self._num_submitted):
            error = self._ended.get()
            if error is not None:
                raise error
        return time.monotonic() - self._started if self._num_submitted else 0.0
