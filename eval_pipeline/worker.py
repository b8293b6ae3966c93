"""The unit of work, a batch, and the worker that generates its answers and has them judged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from eval_pipeline.config import EngineConfig, EvalConfig, SamplingConfig
from eval_pipeline.engines import Engine, EngineDied, GeneratedAnswer, GenerateRequest, ModelRefused
from eval_pipeline.judge import Submission, Verdict
from eval_pipeline.judge.client import JudgeClient
from eval_pipeline.problems.extract import extract_program
from eval_pipeline.problems.problem import Problem
from verl_ext.errors import UserError, one_line

AnswerKey = tuple[str, int]
"""Problem and sample index of the answer."""


@dataclass(frozen=True)
class BatchId:
    """Identifies a batch of one claim of a job.

    A worker may still work on a batch of a failed attempt when the next attempt submits the same batch; the claim
    tells their events apart.
    """

    claim: int
    """Number of the claim in this process."""
    number: int
    """Index of the batch in its job, from 0."""


@dataclass(frozen=True)
class Batch:
    """A fixed set of answers that the engine generates together.

    The composition of a batch affects the last bits of logits. After a kill, vLLM therefore generates the whole batch
    again, but stored answers are kept. A server decides by itself which requests share a batch, so it is asked only for
    the missing answers.
    """

    id: BatchId
    export: Path | None
    """Model directory; None if a server has the model."""
    problems: dict[str, Problem]
    """The problems of the requests, by `problem_id`."""
    requests: tuple[GenerateRequest, ...]
    """In the order in which the engine gets them."""
    sampling: SamplingConfig
    answers: dict[AnswerKey, GeneratedAnswer] = field(default_factory=dict)
    """Stored answers."""
    judged: frozenset[AnswerKey] = frozenset()
    """Answers that already have a verdict."""
    weights: str = ""
    """Digest of the model's weights, because a run that is resumed may save other weights in the same directory."""

    @property
    def needs_engine(self) -> bool:
        """Whether an answer is missing."""
        return any(key_of(request) not in self.answers for request in self.requests)


def key_of(request: GenerateRequest) -> AnswerKey:
    """The key of the answer to a request."""
    return request.problem_id, request.sample


def split_into_batches(
    problems: Sequence[Problem], sampling: SamplingConfig, size: int
) -> list[tuple[GenerateRequest, ...]]:
    """The requests of a dataset in fixed batches, ordered by problem, then by sample."""
    requests = [
        GenerateRequest(problem.problem_id, problem.prompt, sample, problem.earlier)
        for problem in problems
        for sample in range(sampling.num_samples)
    ]
    return [tuple(requests[start : start + size]) for start in range(0, len(requests), size)]


# Events of a batch


@dataclass(frozen=True)
class BatchStarted:
    """The context of the answers and verdicts that follow. It comes first, so that a kill cannot lose it."""

    batch: BatchId
    context: dict[str, object]
    """`isolation` of the judge and, if the engine generates answers, its `protocol`."""


@dataclass(frozen=True)
class AnswerReceived:
    """The engine generated an answer."""

    batch: BatchId
    key: AnswerKey
    answer: GeneratedAnswer


@dataclass(frozen=True)
class AnswerJudged:
    """The judge returned a verdict."""

    batch: BatchId
    key: AnswerKey
    verdict: Verdict


@dataclass(frozen=True)
class BatchFinished:
    """Every answer of a batch has a verdict."""

    batch: BatchId
    seconds: dict[str, float]
    """Wall-clock seconds by phase."""


@dataclass(frozen=True)
class BatchFailed:
    """A batch failed, and with it the attempt at its job; a retry makes sense only after the back-off."""

    batch: BatchId
    error: str
    is_final: bool = False
    """Whether every retry would fail in the same way."""


MAX_LOSSES = 3
"""A job fails after this many workers have died with one of its batches, because the batch may be what kills them."""


@dataclass(frozen=True)
class BatchLost:
    """A worker or its engine died while running a batch; another worker can run it immediately."""

    batch: BatchId
    reason: str


Event = BatchStarted | AnswerReceived | AnswerJudged | BatchFinished | BatchFailed | BatchLost
Emit = Callable[[Event], None]


def open_engine(config: EngineConfig, export: Path | None) -> Engine:
    """Create the configured engine, without starting it.

    Args:
        export: Hugging Face model directory; None takes the server's model. If given, the server must have loaded it.

    Raises:
        UserError: vLLM needs a model.
    """
    if config.kind == "openai":
        from eval_pipeline.engines.openai_engine import OpenAIEngine

        return OpenAIEngine(config, export)
    if export is None:
        raise UserError(
            "engine.kind=vllm needs a model; specify a checkpoint, or set engine.kind=openai to use a running server"
        )
    from eval_pipeline.engines.vllm_engine import VLLMEngine

    return VLLMEngine(config, export)


class EvalWorker:
    """An engine and a judge, each started for the first batch that needs it. Leaving the context ends both.

    Two threads may call `run` at a time: while the last answers of one batch are judged, the engine starts the next.
    """

    def __init__(self, config: EvalConfig) -> None:
        self._config = config
        self._engine: Engine | None = None
        self._model: tuple[Path | None, str] | None = None
        self._engine_lock = threading.Lock()
        self._judge: JudgeClient | None = None
        self._judge_lock = threading.Lock()

    def __enter__(self) -> EvalWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_engine()
        if self._judge is not None:
            self._judge.__exit__(None, None, None)

    def run(self, batch: Batch, emit: Emit) -> None:
        """Run a batch.

        Args:
            emit: called with each event, from several threads; the last is `BatchFinished`, `BatchFailed` or
                `BatchLost`.
        """
        try:
            emit(BatchFinished(batch.id, self._run(batch, emit)))
        except UserError as error:
            emit(BatchFailed(batch.id, str(error), is_final=isinstance(error, ModelRefused)))
        except _EngineLost as error:
            emit(BatchLost(batch.id, str(error)))
        except Exception as error:  # any error fails the job, but the worker can run other batches
            emit(BatchFailed(batch.id, one_line(error)))

    def _run(self, batch: Batch, emit: Emit) -> dict[str, float]:
        """Run a batch; returns the wall-clock seconds by phase."""
        judge = self._open_judge()
        pending = _PendingVerdicts(judge, batch, emit)
        seconds: dict[str, float] = {}
        if batch.answers:
            emit(BatchStarted(batch.id, {"isolation": judge.isolation}))
        for key, answer in batch.answers.items():
            pending.submit(key, answer)
        if batch.needs_engine:
            with self._engine_lock:
                seconds = self._generate(batch, emit, judge, pending)
        seconds["judge_s"] = pending.wait()
        return seconds

    def _generate(self, batch: Batch, emit: Emit, judge: JudgeClient, pending: _PendingVerdicts) -> dict[str, float]:
        """Generate the missing answers; returns the wall-clock seconds by phase."""
        previous = self._engine
        try:
            engine = self._open_engine(batch)
            before = dict(engine.seconds) if engine is previous else {}
            emit(BatchStarted(batch.id, {"isolation": judge.isolation, "protocol": dict(engine.protocol)}))
            requests = batch.requests
            if self._config.engine.kind == "openai":
                requests = tuple(request for request in requests if key_of(request) not in batch.answers)
            try:
                for request, answer in engine.answers(requests, batch.sampling):
                    key = key_of(request)
                    if key not in batch.answers:
                        emit(AnswerReceived(batch.id, key, answer))
                        pending.submit(key, answer)
            except EngineDied as error:
                if self._config.engine.kind == "vllm":
                    raise _EngineLost(" ".join(str(error).split())) from error  # with the last lines of the log
                raise  # we do not restart servers, so the job must back off
        except BaseException:
            self._close_engine()  # the next batch starts a new one
            raise
        return {name: value - before.get(name, 0.0) for name, value in engine.seconds.items()}

    def _open_engine(self, batch: Batch) -> Engine:
        model = batch.export, batch.weights
        if self._engine is None or self._model != model:
            self._close_engine()
            engine = open_engine(self._config.engine, batch.export)
            self._engine, self._model = engine.__enter__(), model
        return self._engine

    def _close_engine(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.__exit__(None, None, None)

    def _open_judge(self) -> JudgeClient:
        with self._judge_lock:
            if self._judge is None:
                self._judge = JudgeClient(self._config.judge).__enter__()
            return self._judge


class _EngineLost(Exception):
    """vLLM died during generation; a new process can run the batch."""


class _PendingVerdicts:
    """The verdicts of a batch that have not arrived."""

    def __init__(self, judge: JudgeClient, batch: Batch, emit: Emit) -> None:
        self._judge, self._batch, self._emit = judge, batch, emit
        self._num_submitted = 0
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._started = time.monotonic()

    def submit(self, key: AnswerKey, answer: GeneratedAnswer) -> None:
        """Submit an answer to the judge, unless it has a verdict."""
        if key in self._batch.judged:
            return
        if not self._num_submitted:
            self._started = time.monotonic()
        self._num_submitted += 1
        problem = self._batch.problems[key[0]]
        program = extract_program(problem, answer.text)
        future = self._judge.submit(Submission(program, problem.tests, error=answer.error))
        future.add_done_callback(lambda done: self._forward(key, done))

    def _forward(self, key: AnswerKey, done: Future[Verdict]) -> None:
        if done.exception() is None:
            self._emit(AnswerJudged(self._batch.id, key, done.result()))
        self._ended.put(done.exception())

    def wait(self) -> float:
        """Wait for all verdicts; returns the seconds since the first submission, or raises the first failure."""
        for _ in range(self._num_submitted):
            error = self._ended.get()
            if error is not None:
                raise error
        return time.monotonic() - self._started if self._num_submitted else 0.0
