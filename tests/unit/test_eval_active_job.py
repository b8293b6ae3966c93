"""Answers and verdicts on disk, and jobs that resume from them."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from eval_pipeline import active_job as active_job_module
from eval_pipeline.active_job import ActiveJob, AnswerStore
from eval_pipeline.checkpoints import EvalCheckpoint
from eval_pipeline.config import EvalConfig, SamplingConfig
from eval_pipeline.engines import GeneratedAnswer
from eval_pipeline.jobs import Job
from eval_pipeline.judge import FunctionTests, Verdict
from eval_pipeline.problems.problem import Problem
from eval_pipeline.recipe import EvalDigests, load_eval_config
from eval_pipeline.worker import (
    MAX_LOSSES,
    AnswerJudged,
    AnswerReceived,
    Batch,
    BatchFailed,
    BatchFinished,
    BatchLost,
    BatchStarted,
    key_of,
    split_into_batches,
)

PROBLEMS = [Problem(f"p{i}", f"Write f{i}.", FunctionTests(f"f{i}", (f"assert f{i}()",))) for i in range(5)]
ANSWERS = {
    (problem.problem_id, 0): GeneratedAnswer(f"answer {i} \u2028 \ud800", i, i == 2)
    for i, problem in enumerate(PROBLEMS)
}
VERDICTS = {key: Verdict("success", 1, 1, judge_time=0.5) for key in ANSWERS}
KEYS = list(ANSWERS)
DIGESTS = EvalDigests("model", "a" * 32, "v" * 32)
JOB = Job("step_1", "d", 1, DIGESTS.verdicts, "running", 0, 0.0, "me", {}, 1.0, None, None)
CONTEXT = {"isolation": "bwrap", "protocol": {"engine": "vllm"}}


@pytest.fixture(scope="module")
def recipe() -> EvalConfig:
    return load_eval_config("quickstart", ["batch_size=2"])


def open_store(
    directory: Path, answers: str = DIGESTS.answers, verdicts: str = DIGESTS.verdicts
) -> closing[AnswerStore]:
    return closing(AnswerStore(directory, answers, verdicts))


def fill(directory: Path, num_answers: int, num_verdicts: int) -> None:
    with open_store(directory) as store:
        store.add_context(CONTEXT)
        for key in KEYS[:num_answers]:
            store.add_answer(key, ANSWERS[key])
        for key in KEYS[:num_verdicts]:
            store.add_verdict(key, VERDICTS[key])


def file_of(directory: Path, kind: str) -> Path:
    (path,) = directory.glob(f"{kind}-*.jsonl")
    return path


def evaluation(directory: Path, recipe: EvalConfig, job: Job = JOB) -> closing[ActiveJob]:
    checkpoint = EvalCheckpoint(directory, directory / "huggingface", step=1)
    return closing(ActiveJob(job, checkpoint, PROBLEMS, recipe, DIGESTS, directory))


def work(one: ActiveJob, batch: Batch) -> None:
    """Report the events of a worker, in its order."""
    one.handle(BatchStarted(batch.id, CONTEXT))
    for request in batch.requests:
        key = key_of(request)
        if key not in batch.answers:
            one.handle(AnswerReceived(batch.id, key, ANSWERS[key]))
        if key not in batch.judged:
            one.handle(AnswerJudged(batch.id, key, VERDICTS[key]))
    one.handle(BatchFinished(batch.id, {"generate_s": 2.0, "judge_s": 0.5}))


def test_time_left_does_not_count_loading(tmp_path: Path, recipe: EvalConfig) -> None:
    with evaluation(tmp_path, recipe) as one:
        for name in ("start_t", "last_print_t"):  # the model was loading for an hour
            setattr(one._bar, name, getattr(one._bar, name) - 3600)
        work(one, one.next_batch())
        assert one._bar.n > 0 and one._bar.format_dict["elapsed"] < 60


@pytest.mark.parametrize(("num_failed", "remaining"), [(0, "1 answer remaining"), (2, "3 answers remaining")])
def test_remaining_answers_include_stored_api_errors(
    tmp_path: Path, recipe: EvalConfig, num_failed: int, remaining: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, num_answers=5, num_verdicts=4 - num_failed)
    with open_store(tmp_path) as store:
        for key in KEYS[4 - num_failed : 4]:
            store.add_verdict(key, Verdict("api_error", 0, 1))
    with evaluation(tmp_path, recipe):
        assert f"Evaluating step_1 on d: {remaining}" in capsys.readouterr().err


def test_reopened_store_has_stored_rows(tmp_path: Path) -> None:
    fill(tmp_path, num_answers=5, num_verdicts=3)
    with open_store(tmp_path) as store:
        assert store.answers == ANSWERS
        assert store.verdicts == {key: VERDICTS[key] for key in KEYS[:3]}
        assert store.context == CONTEXT


@pytest.mark.parametrize("num_bytes", [1, 7, 30])
@pytest.mark.parametrize("kind", ["answers", "verdicts"])
def test_torn_last_line_is_dropped_and_rewritten(
    tmp_path: Path, kind: str, num_bytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, num_answers=5, num_verdicts=5)
    path = file_of(tmp_path, kind)
    whole = path.read_bytes()
    path.write_bytes(whole[:-num_bytes])
    with open_store(tmp_path) as store:
        assert "ended in the middle of a line" in capsys.readouterr().err
        assert list(store.answers if kind == "answers" else store.verdicts) == KEYS[:4]
        store.add_answer(KEYS[4], ANSWERS[KEYS[4]])
        store.add_verdict(KEYS[4], VERDICTS[KEYS[4]])
    assert path.read_bytes() == whole
    with open_store(tmp_path) as store:
        assert (store.answers, store.verdicts) == (ANSWERS, VERDICTS)


def test_second_row_of_same_key_is_ignored(tmp_path: Path) -> None:
    fill(tmp_path, num_answers=1, num_verdicts=1)
    other = {"answers": replace(ANSWERS[KEYS[0]], text="other"), "verdicts": Verdict("timeout", 0, 1)}
    with open_store(tmp_path) as store:
        store.add_answer(KEYS[0], other["answers"])
        store.add_verdict(KEYS[0], other["verdicts"])
    for kind, row in other.items():
        path = file_of(tmp_path, kind)
        assert len(path.read_text().splitlines()) == 1
        with path.open("a") as file:  # as if by a process that lost its claim
            file.write(json.dumps({"problem_id": "p0", "sample": 0, **vars(row)}) + "\n")
    with open_store(tmp_path) as store:
        assert (store.answers[KEYS[0]], store.verdicts[KEYS[0]]) == (ANSWERS[KEYS[0]], VERDICTS[KEYS[0]])


def test_verdict_without_its_answer_is_discarded(tmp_path: Path) -> None:
    fill(tmp_path, num_answers=2, num_verdicts=2)
    lines = file_of(tmp_path, "answers").read_bytes().splitlines(keepends=True)
    file_of(tmp_path, "answers").write_bytes(lines[0])
    new = Verdict("wrong_answer", 0, 1)
    with open_store(tmp_path) as store:
        assert list(store.verdicts) == KEYS[:1]
        store.add_answer(KEYS[1], replace(ANSWERS[KEYS[1]], text="sampled again"))
        store.add_verdict(KEYS[1], new)
    with open_store(tmp_path) as store:
        assert store.verdicts == {KEYS[0]: VERDICTS[KEYS[0]], KEYS[1]: new}


def test_zeroed_line_is_dropped(tmp_path: Path) -> None:
    fill(tmp_path, num_answers=3, num_verdicts=0)
    path = file_of(tmp_path, "answers")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0" * (len(lines[1]) - 1) + b"\n" + lines[2])
    with open_store(tmp_path) as store:
        assert list(store.answers) == [KEYS[0], KEYS[2]]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("answers", {"finish_reason": "stop"}),  # a field that is not there yet
        ("answers", {"num_tokens": None}),
        ("answers", {"text": 3}),
        ("answers", {"sample": "0"}),
        ("answers", {"problem_id": ["p1"]}),
        ("verdicts", {"tests": []}),
        ("verdicts", {"error_type": "memory"}),
        ("verdicts", {"num_passed": "1"}),
        ("verdicts", {"judge_time": None}),
    ],
)
@pytest.mark.parametrize("row", [1, 4])
def test_row_of_another_version_is_skipped_and_recomputed(
    tmp_path: Path, recipe: EvalConfig, kind: str, change: dict, row: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last row is not treated as torn."""
    fill(tmp_path, num_answers=5, num_verdicts=5)
    path = file_of(tmp_path, kind)
    lines = path.read_text().splitlines(keepends=True)
    lines[row] = json.dumps({**json.loads(lines[row]), **change}) + "\n"
    path.write_text("".join(lines))
    with evaluation(tmp_path, recipe) as one:
        [warning] = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
        assert str(path) in warning and "skipped 1 rows" in warning
        batch = one.next_batch()
        assert not one.has_batches
        missing = batch.requests[0] if row == 4 else batch.requests[1]
        assert key_of(missing) == KEYS[row] and batch.needs_engine == (kind == "answers")
        work(one, batch)
        assert one.is_complete and [each.answer for each in one.judged_answers()] == list(ANSWERS.values())
    assert lines[row] in path.read_text()  # nothing of another version is removed
    with evaluation(tmp_path, recipe) as again:
        assert again.is_complete


@pytest.mark.parametrize("kind", ["protocol", "isolation"])
@pytest.mark.parametrize("content", [None, "", "7", "\x00"])
def test_rows_without_readable_context_are_recomputed(
    tmp_path: Path, recipe: EvalConfig, kind: str, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, num_answers=5, num_verdicts=5)
    [path] = tmp_path.glob(f"{kind}-*.json")
    path.unlink() if content is None else path.write_text(content)
    with evaluation(tmp_path, recipe) as one:
        assert "missing or unreadable" in capsys.readouterr().err
        while one.has_batches:
            batch = one.next_batch()
            assert batch.needs_engine == (kind == "protocol") and not batch.judged
            work(one, batch)
        assert one.is_complete and one.context == CONTEXT
    with open_store(tmp_path) as store:
        assert (store.answers, store.verdicts, store.context) == (ANSWERS, VERDICTS, CONTEXT)


def test_another_digest_uses_other_files(tmp_path: Path) -> None:
    fill(tmp_path, num_answers=5, num_verdicts=5)
    with open_store(tmp_path, verdicts="w" * 32) as store:  # only the judge's limits have changed
        assert (store.answers, store.verdicts) == (ANSWERS, {})
        assert store.context == {"protocol": {"engine": "vllm"}}  # the context of the answers, which are unchanged
    with open_store(tmp_path, "b" * 32, "x" * 32) as store:
        assert (store.answers, store.verdicts) == ({}, {})


@pytest.mark.parametrize(("num_samples", "size"), [(1, 2), (3, 4), (1, 64)])
def test_batches_cover_every_request_once_in_stable_order(num_samples: int, size: int) -> None:
    sampling = SamplingConfig(temperature=1.0, num_samples=num_samples)
    batches = split_into_batches(PROBLEMS, sampling, size)
    assert batches == split_into_batches(list(PROBLEMS), sampling, size)
    keys = [key_of(request) for batch in batches for request in batch]
    assert keys == [(problem.problem_id, sample) for problem in PROBLEMS for sample in range(num_samples)]
    assert {len(batch) for batch in batches[:-1]} <= {size}


def test_evaluation_runs_from_start_to_completion(tmp_path: Path, recipe: EvalConfig) -> None:
    with evaluation(tmp_path, recipe) as one:
        sizes = []
        while one.has_batches:
            batch = one.next_batch()
            sizes.append(len(batch.requests))
            assert batch.needs_engine and not one.is_complete
            work(one, batch)
        assert sizes == [2, 2, 1] and one.is_complete
        first = one.judged_answers()
    assert [judged.problem for judged in first] == PROBLEMS
    assert [judged.answer for judged in first] == list(ANSWERS.values())
    with evaluation(tmp_path, recipe) as again:
        assert again.is_complete and not again.has_batches
        assert again.judged_answers() == first
        assert again.context == CONTEXT


@pytest.mark.parametrize("num_verdicts", [0, 2, 5])
def test_result_context_survives_kill_at_any_point(tmp_path: Path, recipe: EvalConfig, num_verdicts: int) -> None:
    with evaluation(tmp_path, recipe) as one:  # killed before any batch has finished
        while one.has_batches:
            batch = one.next_batch()
            one.handle(BatchStarted(batch.id, CONTEXT))
            for key in map(key_of, batch.requests):
                one.handle(AnswerReceived(batch.id, key, ANSWERS[key]))
                if KEYS.index(key) < num_verdicts:
                    one.handle(AnswerJudged(batch.id, key, VERDICTS[key]))
    with evaluation(tmp_path, recipe) as one:
        while one.has_batches:
            batch = one.next_batch()
            assert not batch.needs_engine
            one.handle(BatchStarted(batch.id, {"isolation": "bwrap"}))  # no engine, no protocol
            for key in map(key_of, batch.requests):
                if key not in batch.judged:
                    one.handle(AnswerJudged(batch.id, key, VERDICTS[key]))
            one.handle(BatchFinished(batch.id, {}))
        assert one.is_complete
        assert one.context == CONTEXT


def test_partly_judged_batch_includes_known_answers(tmp_path: Path, recipe: EvalConfig) -> None:
    fill(tmp_path, num_answers=4, num_verdicts=3)
    with evaluation(tmp_path, recipe) as one:
        second, third = one.next_batch(), one.next_batch()
        assert not one.has_batches  # the first is done
    assert [key_of(request) for request in second.requests] == KEYS[2:4]
    assert second.answers == {key: ANSWERS[key] for key in KEYS[2:4]} and not second.needs_engine
    assert second.judged == {KEYS[2]}
    assert [key_of(request) for request in third.requests] == KEYS[4:] and third.needs_engine
    assert set(third.problems) == {"p4"}


def test_partly_answered_batch_requests_all_answers(tmp_path: Path, recipe: EvalConfig) -> None:
    fill(tmp_path, num_answers=1, num_verdicts=0)
    with evaluation(tmp_path, recipe) as one:
        batch = one.next_batch()
    assert [key_of(request) for request in batch.requests] == KEYS[:2]
    assert set(batch.answers) == {KEYS[0]} and batch.needs_engine


def test_lost_batch_is_retried_up_to_limit(tmp_path: Path, recipe: EvalConfig) -> None:
    with evaluation(tmp_path, recipe) as one:
        for _ in range(MAX_LOSSES - 1):
            batch = one.next_batch()
            assert batch.id.number == 0
            assert one.handle(BatchLost(batch.id, "it died")) is None
        error = one.handle(BatchLost(one.next_batch().id, "it died"))
        assert error is not None and error.startswith("it died; 3 workers or engines have died")


def test_node_death_counts_one_loss_per_batch(tmp_path: Path, recipe: EvalConfig) -> None:
    with evaluation(tmp_path, recipe) as one:
        batches = [one.next_batch() for _ in range(3)]
        assert len(batches) >= MAX_LOSSES
        assert [one.handle(BatchLost(batch.id, "the node died")) for batch in batches] == [None] * 3
        assert {one.next_batch().id for _ in range(3)} == {batch.id for batch in batches}


def test_failed_batch_fails_job(tmp_path: Path, recipe: EvalConfig) -> None:
    with evaluation(tmp_path, recipe) as one:
        assert one.handle(BatchFailed(one.next_batch().id, "no such model")) == "no such model"


def test_seconds_add_up_over_sessions(tmp_path: Path, recipe: EvalConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(active_job_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with evaluation(tmp_path, recipe) as one:
        clock.now += 60
        assert one.seconds == {"active_s": 0.0}  # the model is being loaded
        for _ in range(2):
            work(one, one.next_batch())
        clock.now += 5
        first = one.seconds
    assert first == {"generate_s": 4.0, "judge_s": 1.0, "active_s": 5.0}
    with evaluation(tmp_path, recipe, replace(JOB, seconds=first)) as one:
        assert one.seconds == first
        work(one, one.next_batch())
        clock.now += 2
        assert one.seconds == {"generate_s": 6.0, "judge_s": 1.5, "active_s": 7.0}
