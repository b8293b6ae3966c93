"""Jobs whose batches are shared by several workers, and workers that fail in part."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import cast
from unittest.mock import MagicMock, patch

import pytest

from eval_pipeline.__main__ import main
from eval_pipeline.active_job import ActiveJob, AnswerStore
from eval_pipeline.checkpoints import EvalCheckpoint
from eval_pipeline.config import EngineConfig, SamplingConfig
from eval_pipeline.engines import EngineDied, GeneratedAnswer, GenerateRequest, ModelRefused
from eval_pipeline.engines.vllm_process import VllmModel
from eval_pipeline.jobs import Job, JobQueue
from eval_pipeline.judge import FunctionTests, Verdict
from eval_pipeline.pool import BATCHES_PER_WORKER, LocalPool, PoolWorker, WorkerPool
from eval_pipeline.problems.problem import Problem
from eval_pipeline.recipe import EvalDigests, load_eval_config
from eval_pipeline.run import EvalContext, JobRunner, Task
from eval_pipeline.worker import (
    AnswerJudged,
    AnswerReceived,
    Batch,
    BatchFailed,
    BatchFinished,
    BatchId,
    BatchLost,
    BatchStarted,
    EvalWorker,
    Event,
    key_of,
)
from tests.helpers.checkpoints import commit
from tests.helpers.evaluation import HEART, write_recipe
from verl_ext.errors import UserError

PROBLEMS = [Problem(f"p{i}", "", FunctionTests("f", ("assert f(1) == 2",))) for i in range(4)]
RIGHT = GeneratedAnswer("```python\ndef f(x):\n    return x + 1\n```", num_tokens=9, truncated=False)
SETTINGS = ["batch_size=2", "judge.isolation=rlimits", "judge.num_workers=1"]
RECIPE = load_eval_config(None, SETTINGS)
CONTEXT = {"isolation": "rlimits", "protocol": {"engine": "none"}}


class Pool(WorkerPool):
    """A pool that accepts every batch and returns the events that the test sets."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.coming: list[Event] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def has_room_for(self, export: Path | None) -> bool:
        return True

    def submit(self, batch: Batch) -> None:
        self.batches.append(batch)

    def events(self, timeout_s: float) -> list[Event]:
        coming, self.coming = self.coming, []
        return coming


class Setup:
    """A queue with one job of two batches, and the runner that works on it."""

    def __init__(self, directory: Path, pool: WorkerPool, weights: str = "model") -> None:
        self._digests, self._directory = EvalDigests(weights, "a" * 32, "v" * 32), directory / "work"
        checkpoint = EvalCheckpoint(directory, None, step=1)
        self.jobs = JobQueue(directory, backoff_s=0)
        self.jobs.add_all([("step_1", "few", 1, self._digests.verdicts)])
        self.tasks = [Task(checkpoint, "few", self._digests.verdicts)]
        self.judged: list[Sequence[str]] = []
        self._runner = JobRunner(cast(EvalContext, self), pool)

    def open_job(self, job: Job, checkpoint: EvalCheckpoint) -> ActiveJob:
        return ActiveJob(job, checkpoint, PROBLEMS, RECIPE, self._digests, self._directory)

    def step(self) -> None:
        with patch("eval_pipeline.run.write_job_result", self._write_result):
            self._runner.step(self.tasks)

    def _write_result(self, context: EvalContext, active: ActiveJob) -> None:
        self.judged.append([each.verdict.error_type for each in active.judged_answers()])

    @property
    def job(self) -> Job:
        [job] = self.jobs.jobs()
        return job


def done(batch: Batch) -> list[Event]:
    """The events of a worker for a successful batch."""
    events: list[Event] = [BatchStarted(batch.id, CONTEXT)]
    for key in map(key_of, batch.requests):
        events += [AnswerReceived(batch.id, key, RIGHT), AnswerJudged(batch.id, key, Verdict("success", 1, 1))]
    return [*events, BatchFinished(batch.id, {})]


@pytest.mark.parametrize("ends", [True, False])
def test_events_of_failed_attempt_do_not_reach_next_attempt(tmp_path: Path, ends: bool) -> None:
    """One worker's engine dies. Another worker finishes or fails its batch during the next attempt."""
    pool = Pool()
    setup = Setup(tmp_path, pool)
    setup.step()
    first, second = pool.batches
    *answers, end = done(second)
    end = end if ends else BatchFailed(second.id, "this engine died too")
    pool.coming = [BatchFailed(first.id, "the engine died"), *answers]
    setup.step()
    assert setup.job.attempts == 1
    setup.step()
    _, _, first_again, second_again = pool.batches
    pool.coming = [end, *done(first_again)]
    setup.step()
    assert setup.job.state == "running" and not setup.judged
    pool.coming = done(second_again)
    setup.step()
    assert setup.job.state == "done" and setup.judged == [["success"] * 4]


@pytest.mark.parametrize("fails_again", [False, True])
def test_api_error_is_retried_once(tmp_path: Path, fails_again: bool) -> None:
    """Only the failed part is repeated; finished answers and verdicts are kept."""
    pool = Pool()
    setup = Setup(tmp_path, pool)
    setup.step()
    first, second = pool.batches
    refused, unjudged = map(key_of, first.requests)
    no_answer, no_verdict = replace(RIGHT, text="", error="refused"), Verdict("api_error", 0, 1)
    pool.coming = [
        BatchStarted(first.id, CONTEXT),
        AnswerReceived(first.id, refused, no_answer),
        AnswerJudged(first.id, refused, no_verdict),
        AnswerReceived(first.id, unjudged, RIGHT),
        AnswerJudged(first.id, unjudged, no_verdict),
        BatchFinished(first.id, {}),
        *done(second),
    ]
    setup.step()
    assert setup.job.state == "running"
    setup.step()
    again = pool.batches[2]
    assert [key_of(request) for request in again.requests] == [refused, unjudged]
    assert again.answers == {unjudged: RIGHT} and not again.judged
    verdict = no_verdict if fails_again else Verdict("success", 1, 1)
    pool.coming = [
        AnswerReceived(again.id, refused, no_answer if fails_again else RIGHT),
        AnswerJudged(again.id, refused, verdict),
        AnswerJudged(again.id, unjudged, Verdict("success", 1, 1)),
        BatchFinished(again.id, {}),
    ]
    setup.step()
    kinds = ["api_error" if fails_again else "success", *["success"] * 3]
    assert setup.job.state == "done" and setup.judged == [kinds] and len(pool.batches) == 3
    with closing(AnswerStore(tmp_path / "work", "a" * 32, "v" * 32)) as store:  # seen from another process
        assert [store.verdicts[problem.problem_id, 0].error_type for problem in PROBLEMS] == kinds
        assert (store.answers[refused].error is None) != fails_again


class Workers(Pool):
    """Workers in this process that take turns and work when asked for events."""

    def __init__(self, *workers: EvalWorker) -> None:
        super().__init__()
        self._workers = cycle(workers)

    def events(self, timeout_s: float) -> list[Event]:
        batches, self.batches = self.batches, []
        events: list[Event] = []
        for batch in batches:
            next(self._workers).run(batch, events.append)
        return events


class Engines:
    """Opens engines that answer correctly and counts requests; the first engine dies at its first answer."""

    def __init__(self) -> None:
        self.num_opened = 0
        self.asked: Counter[str] = Counter()

    def __call__(self, settings: EngineConfig, export: Path | None) -> MagicMock:
        self.num_opened += 1
        engine = MagicMock(protocol=CONTEXT["protocol"], seconds={})
        engine.__enter__.return_value = engine
        engine.answers = self._die if self.num_opened == 1 else self._answers
        return engine

    def _die(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig
    ) -> Iterator[tuple[GenerateRequest, GeneratedAnswer]]:
        raise EngineDied("the vLLM process died")
        yield

    def _answers(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig
    ) -> Iterator[tuple[GenerateRequest, GeneratedAnswer]]:
        for request in requests:
            self.asked[request.problem_id] += 1
            yield request, RIGHT


def test_dead_engine_loses_only_its_own_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines()
    monkeypatch.setattr("eval_pipeline.worker.open_engine", engines)
    with EvalWorker(RECIPE) as first, EvalWorker(RECIPE) as second:
        setup = Setup(tmp_path, Workers(first, second))
        for _ in range(3):
            setup.step()
    assert setup.job.state == "done" and setup.judged == [["success"] * 4]
    assert (setup.job.attempts, set(engines.asked.values())) == (0, {1})


def test_other_weights_in_same_directory_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is resumed may save a step again."""
    engine = MagicMock(protocol=CONTEXT["protocol"], seconds={})
    engine.__enter__.return_value = engine
    engine.answers.side_effect = lambda requests, _: ((request, RIGHT) for request in requests)
    open_engine = MagicMock(return_value=engine)
    monkeypatch.setattr("eval_pipeline.worker.open_engine", open_engine)
    num_loads: list[int] = []
    with EvalWorker(RECIPE) as worker:
        for weights in ("first", "first", "second"):
            setup = Setup(tmp_path / str(len(num_loads)), Workers(worker), weights)
            for _ in range(2):
                setup.step()
            assert setup.job.state == "done"
            num_loads.append(open_engine.call_count)
    assert num_loads == [1, 1, 2]


@pytest.mark.parametrize(
    ("kind", "dies_at", "event"),
    [("vllm", "load", BatchFailed), ("vllm", "answer", BatchLost), ("openai", "answer", BatchFailed)],
)
def test_dead_engine_loses_or_fails_batch_by_kind(
    kind: str, dies_at: str, event: type[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new vLLM process can run the batch. A dead server or a failed load needs the backoff before a retry."""
    engine = MagicMock(protocol=CONTEXT["protocol"], seconds={})
    engine.__enter__.return_value = engine
    part = engine.__enter__ if dies_at == "load" else engine.answers
    part.side_effect = EngineDied("it died")
    monkeypatch.setattr("eval_pipeline.worker.open_engine", lambda *_: engine)
    config = replace(RECIPE, engine=EngineConfig(kind=kind, base_url="http://localhost:1/v1"))
    request = GenerateRequest("p0", "")
    batch = Batch(BatchId(claim=1, number=0), None, {"p0": PROBLEMS[0]}, (request,), SamplingConfig())
    events: list[Event] = []
    with EvalWorker(config) as worker:
        worker.run(batch, events.append)
    assert type(events[-1]) is event and "it died" in str(events[-1])


@pytest.mark.parametrize(("kind", "asked"), [("vllm", ["p0", "p1"]), ("openai", ["p1"])])
def test_server_is_asked_only_for_missing_answers(kind: str, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM generates the whole batch again, so that the answers are the same bit for bit."""
    engine = MagicMock(protocol=CONTEXT["protocol"], seconds={})
    engine.__enter__.return_value = engine
    engine.answers.side_effect = lambda requests, _: ((request, RIGHT) for request in requests)
    monkeypatch.setattr("eval_pipeline.worker.open_engine", lambda *_: engine)
    config = replace(RECIPE, engine=EngineConfig(kind=kind, base_url="http://localhost:1/v1"))
    requests = tuple(GenerateRequest(f"p{number}", "") for number in range(2))
    problems = {problem.problem_id: problem for problem in PROBLEMS}
    batch = Batch(BatchId(claim=1, number=0), None, problems, requests, SamplingConfig(), {("p0", 0): RIGHT})
    events: list[Event] = []
    with EvalWorker(config) as worker:
        worker.run(batch, events.append)
    assert type(events[-1]) is BatchFinished
    assert [request.problem_id for request in engine.answers.call_args.args[0]] == asked
    assert [event.key for event in events if isinstance(event, AnswerReceived)] == [("p1", 0)]


@pytest.mark.parametrize(("error", "state"), [(ModelRefused, "failed"), (UserError, "pending")])
def test_rejected_model_is_loaded_once(
    error: type[UserError],
    state: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    open_engine = MagicMock(side_effect=error("no such kernel"))
    monkeypatch.setattr("eval_pipeline.worker.open_engine", open_engine)
    with EvalWorker(RECIPE) as worker:
        setup = Setup(tmp_path, Workers(worker))
        setup.step()
    assert (setup.job.state, setup.job.attempts, setup.job.error) == (state, 1, "no such kernel")
    told = capsys.readouterr().err
    assert ("not retried" in told) == (state == "failed") and ("2 left" in told) == (state == "pending")


def test_lost_batch_is_retried_with_message(capsys: pytest.CaptureFixture[str]) -> None:
    """The batch may be lost by a live worker or by one that died with another batch."""
    batches = [
        Batch(BatchId(claim=1, number=number), None, {}, (), SamplingConfig()) for number in range(BATCHES_PER_WORKER)
    ]
    worker = ScriptedWorker([BatchLost(batches[0].id, "vLLM died")], death="the process died")
    for batch in batches:
        worker.submit(batch)
    assert not worker.has_room_for(None)
    lost = [BatchLost(batches[0].id, "vLLM died"), BatchLost(batches[1].id, "the process died")]
    assert worker.receive() == lost and worker.has_room_for(Path("other"))
    told = capsys.readouterr().err
    assert "vLLM died; retrying its batch, at most 2 times" in told
    assert "the process died; retrying its work, at most 2 times" in told


class ScriptedWorker(PoolWorker):
    """A worker that returns these events, then dies."""

    def __init__(self, events: list[Event], death: str) -> None:
        super().__init__()
        self._script = events, death

    def _send(self, batch: Batch) -> None:
        pass

    def _drain(self) -> tuple[list[Event], str | None]:
        return self._script


@pytest.mark.parametrize(
    ("settings", "programs"),
    [(["executor.num_workers=3"], [2] * 3), (["executor.num_workers=8"], [1] * 8), (["judge.num_workers=9"], [9])],
)
def test_judges_of_workers_share_the_cores(
    settings: list[str], programs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(7)))
    pool = LocalPool(load_eval_config(None, settings))
    assert [worker._config.judge.num_workers for worker in pool._workers] == programs


def test_hung_judge_does_not_hang_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the answer may take 0.1 s, and the judge never replies."""
    for name, seconds in {"_CHECK_S": 0.05, "_SANDBOX_START_S": 0.0, "_GRACE_S": 0.0}.items():
        monkeypatch.setattr(f"eval_pipeline.judge.client.{name}", seconds)
    batch = Batch(BatchId(claim=1, number=0), None, {"p0": PROBLEMS[0]}, (), SamplingConfig())
    batch = replace(batch, answers={("p0", 0): RIGHT})
    events: list[Event] = []
    recipe = load_eval_config(None, [*SETTINGS, "judge.limits={cpu_s: 0.1, wall_s: 0.1}"])
    with EvalWorker(recipe) as worker, ThreadPoolExecutor(1) as thread:
        hung = worker._open_judge()._process
        hung.send_signal(signal.SIGSTOP)
        try:
            thread.submit(worker.run, batch, events.append).result(timeout=60)
        finally:
            hung.send_signal(signal.SIGCONT)
    assert isinstance(events[-1], BatchFinished | BatchFailed)


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("eval_pipeline.engines.vllm_process.prepare_vllm_environment", lambda: "a GPU")
    monkeypatch.setattr("eval_pipeline.watch.run_jobs", lambda *_: set())


def test_missing_vllm_is_reported(without_vllm: None) -> None:
    """The message must not be "the vLLM process died (exit code 1)", which suggests that a retry could succeed."""
    with pytest.raises(UserError, match="vLLM"):
        VllmModel(EngineConfig(), "model")


@pytest.mark.parametrize("command", ["check", "run", "watch"])
def test_commands_reject_missing_vllm(
    command: str, tmp_path: Path, without_vllm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path / "few.yaml", {"tier1": {"few": HEART}}, judge={"isolation": "rlimits"})
    checkpoint = commit(tmp_path / "run", 10)
    more = {"check": [], "run": ["--checkpoint", str(checkpoint)], "watch": [str(tmp_path / "run")]}
    with pytest.raises(SystemExit) as left:
        main([command, "--recipe", str(recipe), *more[command]])
    assert left.value.code == 2 and "vLLM is not installed" in capsys.readouterr().err
