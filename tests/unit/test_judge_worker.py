"""A worker and its judge server."""

from __future__ import annotations

from eval_pipeline.config import SamplingConfig
from eval_pipeline.engines.answer import Answer
from eval_pipeline.judge import FunctionTests
from eval_pipeline.problems.problem import Problem
from eval_pipeline.recipe.load import load_recipe
from eval_pipeline.work.batch import Batch, BatchId, Event, Failed, Finished, Verdicted
from eval_pipeline.work.worker import Worker

PROBLEM = Problem("p", "", FunctionTests("f", ("assert f(1) == 2",)))
RIGHT = Answer("```python\ndef f(x):\n    return x + 1\n```", num_tokens=9, truncated=False)


def batch(number: int) -> Batch:
    """An answer that has yet to be judged."""
    id_ = BatchId("step_1", "data", "digest", claim=1, number=number)
    return Batch(id_, None, {"p": PROBLEM}, (), SamplingConfig(), answers={("p", 0): RIGHT})


def done(worker: Worker, number: int) -> list[Event]:
    """The events of a batch."""
    events: list[Event] = []
    worker.work(batch(number), events.append)
    return events


def test_a_judge_server_that_has_died_is_replaced() -> None:
    """A batch that was under way is judged, and so are later ones."""
    with Worker(load_recipe(None, ["judge.num_workers=1", "judge.isolation=rlimits"])) as worker:
        assert isinstance(done(worker, 0)[-1], Finished)
        worker._judge._process.kill()
        events = done(worker, 1)
        assert [event.verdict.error_type for event in events if isinstance(event, Verdicted)] == ["success"]
        assert isinstance(events[-1], Finished) and not any(isinstance(event, Failed) for event in events)
        assert isinstance(done(worker, 2)[-1], Finished)
