"""Jobs whose batches several workers share, and workers whose parts fail."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import TracebackType
from unittest.mock import MagicMock

import pytest

from eval_pipeline.__main__ import main
from eval_pipeline.config import EngineConfig, SamplingConfig
from eval_pipeline.engines.answer import Answer, Request
from eval_pipeline.engines.engine import EngineDied
from eval_pipeline.engines.vllm_model import VllmModel
from eval_pipeline.executors.executor import Executor
from eval_pipeline.judge import FunctionTests, Verdict
from eval_pipeline.ledger.job import Job
from eval_pipeline.ledger.ledger import Ledger
from eval_pipeline.models.checkpoint import Checkpoint
from eval_pipeline.problems.problem import Problem
from eval_pipeline.recipe.load import load_recipe
from eval_pipeline.work.batch import Answered, Batch, BatchId, Described, Event, Failed, Finished, Verdicted, key_of
from eval_pipeline.work.digests import Digests
from eval_pipeline.work.driver import Driver, Task
from eval_pipeline.work.evaluation import Evaluation
from eval_pipeline.work.store import Store
from eval_pipeline.work.worker import Worker
from tests.helpers.checkpoints import commit
from tests.helpers.evaluation import HEART, write_recipe
from verl_ext.errors import UserError

PROBLEMS = [Problem(f"p{i}", "", FunctionTests("f", ("assert f(1) == 2",))) for i in range(4)]
RIGHT = Answer("```python\ndef f(x):\n    return x + 1\n```", num_tokens=9, truncated=False)
RECIPE = load_recipe(
    None,
    ["batch_size=2", "judge.isolation=rlimits", "judge.num_workers=1", "judge.limits={cpu_s: 0.1, wall_s: 0.1}"],
)
CONTEXT = {"isolation": "rlimits", "protocol": {"engine": "none"}}


class Pool(Executor):
    """Takes every batch; its events are those that the test puts there."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.coming: list[Event] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def has_room_for(self, export: Path | None) -> bool:
        return True

    def submit(self, batch: Batch) -> None:
        self.batches.append(batch)

    def events(self, timeout_s: float) -> list[Event]:
        coming, self.coming = self.coming, []
        return coming


class Setup:
    """A ledger with one job of two batches, and the driver that works on it."""

    def __init__(self, directory: Path, pool: Executor) -> None:
        digests = Digests("model", "a" * 32, "v" * 32)
        checkpoint = Checkpoint(directory, None, step=1)
        self.ledger = Ledger(directory, backoff_s=0)
        self.ledger.add("step_1", "few", 1, digests.verdicts)
        self.tasks = [Task(checkpoint, "few", digests.verdicts)]
        self.judged: list[Sequence[str]] = []

        def begin(job: Job, checkpoint: Checkpoint) -> Evaluation:
            return Evaluation(job, checkpoint, PROBLEMS, RECIPE, digests, directory / "work")

        def complete(evaluation: Evaluation) -> None:
            self.judged.append([each.verdict.error_type for each in evaluation.judged()])

        self.driver = Driver(self.ledger, pool, begin, complete)

    @property
    def job(self) -> Job:
        [job] = self.ledger.jobs()
        return job


def done(batch: Batch) -> list[Event]:
    """What a worker says of a batch that goes well."""
    events: list[Event] = [Described(batch.id, CONTEXT)]
    for key in map(key_of, batch.requests):
        events += [Answered(batch.id, key, RIGHT), Verdicted(batch.id, key, Verdict("success", 1, 1))]
    return [*events, Finished(batch.id, {})]


@pytest.mark.parametrize("ends", [True, False])
def test_events_of_a_failed_attempt_do_not_reach_the_next_one(tmp_path: Path, ends: bool) -> None:
    """The engine of one worker dies; another worker ends or fails its batch while the next attempt is under way."""
    pool = Pool()
    setup = Setup(tmp_path, pool)
    setup.driver.turn(setup.tasks)
    first, second = pool.batches
    *answers, end = done(second)
    end = end if ends else Failed(second.id, "this engine died too")
    pool.coming = [Failed(first.id, "the engine died"), *answers]
    setup.driver.turn(setup.tasks)
    assert setup.job.attempts == 1
    setup.driver.turn(setup.tasks)
    _, _, first_again, second_again = pool.batches
    pool.coming = [end, *done(first_again)]
    setup.driver.turn(setup.tasks)
    assert setup.job.state == "running" and not setup.judged
    pool.coming = done(second_again)
    setup.driver.turn(setup.tasks)
    assert setup.job.state == "done" and setup.judged == [["success"] * 4]


@pytest.mark.parametrize("fails_again", [False, True])
def test_an_api_error_is_tried_once_more(tmp_path: Path, fails_again: bool) -> None:
    """Only what failed, the engine or the judge: what was answered and judged is kept."""
    pool = Pool()
    setup = Setup(tmp_path, pool)
    setup.driver.turn(setup.tasks)
    first, second = pool.batches
    refused, unjudged = map(key_of, first.requests)
    no_answer, no_verdict = replace(RIGHT, text="", error="refused"), Verdict("api_error", 0, 1)
    pool.coming = [
        Described(first.id, CONTEXT),
        Answered(first.id, refused, no_answer),
        Verdicted(first.id, refused, no_verdict),
        Answered(first.id, unjudged, RIGHT),
        Verdicted(first.id, unjudged, no_verdict),
        Finished(first.id, {}),
        *done(second),
    ]
    setup.driver.turn(setup.tasks)
    assert setup.job.state == "running"
    setup.driver.turn(setup.tasks)
    again = pool.batches[2]
    assert [key_of(request) for request in again.requests] == [refused, unjudged]
    assert again.answers == {unjudged: RIGHT} and not again.judged
    verdict = no_verdict if fails_again else Verdict("success", 1, 1)
    pool.coming = [
        Answered(again.id, refused, no_answer if fails_again else RIGHT),
        Verdicted(again.id, refused, verdict),
        Verdicted(again.id, unjudged, Verdict("success", 1, 1)),
        Finished(again.id, {}),
    ]
    setup.driver.turn(setup.tasks)
    kinds = ["api_error" if fails_again else "success", *["success"] * 3]
    assert setup.job.state == "done" and setup.judged == [kinds] and len(pool.batches) == 3
    with Store(tmp_path / "work", "a" * 32, "v" * 32) as store:  # what another process finds
        assert [store.verdicts[problem.problem_id, 0].error_type for problem in PROBLEMS] == kinds
        assert (store.answers[refused].error is None) != fails_again


class Workers(Pool):
    """Workers in this process, which take turns and work when they are asked for events."""

    def __init__(self, *workers: Worker) -> None:
        super().__init__()
        self._workers = cycle(workers)

    def events(self, timeout_s: float) -> list[Event]:
        batches, self.batches = self.batches, []
        events: list[Event] = []
        for batch in batches:
            next(self._workers).work(batch, events.append)
        return events


class Engines:
    """Opens engines that answer right, the first of which dies at its first answer; counts what is asked."""

    def __init__(self) -> None:
        self.num_opened = 0
        self.asked: Counter[str] = Counter()

    def __call__(self, settings: EngineConfig, export: Path | None) -> MagicMock:
        self.num_opened += 1
        engine = MagicMock(protocol=CONTEXT["protocol"], seconds={})
        engine.__enter__.return_value = engine
        engine.answers = self._die if self.num_opened == 1 else self._answers
        return engine

    def _die(self, requests: Sequence[Request], sampling: SamplingConfig) -> Iterator[tuple[Request, Answer]]:
        raise EngineDied("the vLLM process died")
        yield

    def _answers(self, requests: Sequence[Request], sampling: SamplingConfig) -> Iterator[tuple[Request, Answer]]:
        for request in requests:
            self.asked[request.problem_id] += 1
            yield request, RIGHT


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="an engine that dies in a living worker fails the whole job, and what other workers do for it is dropped",
)
def test_an_engine_that_dies_costs_its_own_batch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines()
    monkeypatch.setattr("eval_pipeline.work.worker.open_engine", engines)
    with Worker(RECIPE) as first, Worker(RECIPE) as second:
        setup = Setup(tmp_path, Workers(first, second))
        for _ in range(3):
            setup.driver.turn(setup.tasks)
    assert setup.job.state == "done" and setup.judged == [["success"] * 4]
    assert (setup.job.attempts, set(engines.asked.values())) == (0, {1})


def test_a_hung_judge_does_not_hang_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the answer may take 0.1 s, and the judge says nothing at all."""
    for name, seconds in {"_CHECK_S": 0.05, "_SANDBOX_START_S": 0.0, "_GRACE_S": 0.0}.items():
        monkeypatch.setattr(f"eval_pipeline.judge.client.{name}", seconds)
    batch = Batch(BatchId("step_1", "few", "d", claim=1, number=0), None, {"p0": PROBLEMS[0]}, (), SamplingConfig())
    batch = replace(batch, answers={("p0", 0): RIGHT})
    events: list[Event] = []
    with Worker(RECIPE) as worker, ThreadPoolExecutor(1) as thread:
        hung = worker._judge._process
        hung.send_signal(signal.SIGSTOP)
        try:
            thread.submit(worker.work, batch, events.append).result(timeout=60)
        finally:
            hung.send_signal(signal.SIGCONT)
    assert isinstance(events[-1], Finished | Failed)


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("eval_pipeline.engines.vllm_model.prepare_vllm_environment", lambda: "a GPU")
    for module in ("evaluate", "watch"):
        monkeypatch.setattr(f"eval_pipeline.flow.{module}.work_off", lambda *_: set())


def test_an_engine_says_that_vllm_is_missing(without_vllm: None) -> None:
    """Instead of "the vLLM process died (exit code 1)", which another attempt might mend."""
    with pytest.raises(UserError, match="vLLM"):
        VllmModel(EngineConfig(), "model")


@pytest.mark.parametrize("command", ["check", "run", "watch"])
def test_commands_refuse_to_start_without_vllm(
    command: str, tmp_path: Path, without_vllm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path / "few.yaml", {"tier1": {"few": HEART}}, judge={"isolation": "rlimits"})
    checkpoint = commit(tmp_path / "run", 10)
    more = {"check": [], "run": ["--checkpoint", str(checkpoint)], "watch": [str(tmp_path / "run")]}
    with pytest.raises(SystemExit) as left:
        main([command, "--recipe", str(recipe), *more[command]])
    assert left.value.code == 2 and "vLLM is not installed" in capsys.readouterr().err
