"""The judge server of an evaluation worker."""

from __future__ import annotations

from eval_pipeline.config import SamplingConfig
from eval_pipeline.engines import GeneratedAnswer
from eval_pipeline.judge import FunctionTests
from eval_pipeline.problems.problem import Problem
from eval_pipeline.recipe import load_eval_config
from eval_pipeline.worker import AnswerJudged, Batch, BatchFailed, BatchFinished, BatchId, EvalWorker, Event

PROBLEM = Problem("p", "", FunctionTests("f", ("assert f(1) == 2",)))
RIGHT = GeneratedAnswer("```python\ndef f(x):\n    return x + 1\n```", num_tokens=9, truncated=False)


def batch(number: int) -> Batch:
    """A batch with one answer that is not yet judged."""
    id_ = BatchId(claim=1, number=number)
    return Batch(id_, None, {"p": PROBLEM}, (), SamplingConfig(), answers={("p", 0): RIGHT})


def done(worker: EvalWorker, number: int) -> list[Event]:
    """The events of a batch."""
    events: list[Event] = []
    worker.run(batch(number), events.append)
    return events


def test_dead_judge_server_is_replaced() -> None:
    """The batch in progress is judged, and so are later ones."""
    with EvalWorker(load_eval_config(None, ["judge.num_workers=1", "judge.isolation=rlimits"])) as worker:
        assert isinstance(done(worker, 0)[-1], BatchFinished)
        worker._open_judge()._process.kill()
        events = done(worker, 1)
        assert [event.verdict.error_type for event in events if isinstance(event, AnswerJudged)] == ["success"]
        assert isinstance(events[-1], BatchFinished) and not any(isinstance(event, BatchFailed) for event in events)
        assert isinstance(done(worker, 2)[-1], BatchFinished)
