"""The unit of work that is given to a worker, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eval_pipeline.config import SamplingConfig
from eval_pipeline.engines.answer import Answer, Request
from eval_pipeline.judge import Verdict
from eval_pipeline.problems.problem import Problem

Key = tuple[str, int]
"""Problem and number of the answer to it."""


@dataclass(frozen=True)
class BatchId:
    """Which batch of which claim of a job.

    A worker may still be busy with a batch of an attempt that failed, while the next attempt gives the same batch out.

    Attributes:
        checkpoint: of the job, as are the next two.
        dataset: name of the data set.
        digest: of everything that decides the figures.
        claim: tells one claim of the job by this process from a later one.
        number: of the batch, from 0.
    """

    checkpoint: str
    dataset: str
    digest: str
    claim: int
    number: int


@dataclass(frozen=True)
class Batch:
    """Answers that are asked of the engine at once, always the same ones together.

    Which answers share a batch moves the last bits of the logits; so after a kill a batch is answered whole again, and
    what had been kept of it stays.

    Attributes:
        id: which it is.
        export: model directory; None when a server has the model.
        problems: those of the requests, by `problem_id`.
        requests: in the order in which the engine gets them.
        sampling: how answers are drawn.
        answers: those that are there already.
        judged: answers that need no verdict any more.
    """

    id: BatchId
    export: Path | None
    problems: dict[str, Problem]
    requests: tuple[Request, ...]
    sampling: SamplingConfig
    answers: dict[Key, Answer] = field(default_factory=dict)
    judged: frozenset[Key] = frozenset()

    @property
    def needs_engine(self) -> bool:
        """Whether an answer is missing."""
        return any(key_of(request) not in self.answers for request in self.requests)


@dataclass(frozen=True)
class Described:
    """What answers and verdicts depend on; comes before the first of them, so that no kill can part them.

    Attributes:
        batch: under which it was found out.
        context: `isolation`, the level that the judge uses; `protocol` of the engine, where one answers.
    """

    batch: BatchId
    context: dict[str, object]


@dataclass(frozen=True)
class Answered:
    """An answer came."""

    batch: BatchId
    key: Key
    answer: Answer


@dataclass(frozen=True)
class Verdicted:
    """A verdict came."""

    batch: BatchId
    key: Key
    verdict: Verdict


@dataclass(frozen=True)
class Finished:
    """All of a batch is answered and judged.

    Attributes:
        batch: which.
        seconds: wall-clock seconds by phase.
    """

    batch: BatchId
    seconds: dict[str, float]


@dataclass(frozen=True)
class Failed:
    """A batch could not be done; the worker lives.

    Attributes:
        batch: which.
        error: why.
    """

    batch: BatchId
    error: str


@dataclass(frozen=True)
class Lost:
    """A worker died with a batch; somebody else may do it.

    Attributes:
        batch: which.
        reason: what is known of the death.
    """

    batch: BatchId
    reason: str


Event = Described | Answered | Verdicted | Finished | Failed | Lost


def key_of(request: Request) -> Key:
    """The key of the answer to a request."""
    return request.problem_id, request.sample


def batches_of(problems: Sequence[Problem], sampling: SamplingConfig, size: int) -> list[tuple[Request, ...]]:
    """Cut the requests of a data set into fixed batches: problem by problem, all samples of one together."""
    requests = [
        Request(problem.problem_id, problem.prompt, sample)
        for problem in problems
        for sample in range(sampling.num_samples)
    ]
    return [tuple(requests[start : start + size]) for start in range(0, len(requests), size)]
