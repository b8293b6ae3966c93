"""The evaluation benchmark: its summary numbers, its judge inputs, and its timing of the command."""

import json
import os
from dataclasses import replace
from unittest.mock import MagicMock

import pytest

from benchmarks.evaluation import ReplacingEngine, RoundEvents, WorkerRounds, overlap_of, parts_of, summary_of
from eval_pipeline.config import SamplingConfig
from eval_pipeline.engines import GeneratedAnswer, GenerateRequest
from eval_pipeline.recipe import load_eval_config
from eval_pipeline.report.results import DatasetResult, EvaluatedModel
from eval_pipeline.worker import AnswerReceived, BatchFailed, BatchId, BatchLost, key_of
from verl_ext.errors import UserError


def timed(wall_s, cpu_s, **more):
    return {"wall_s": wall_s, "cpu_s": cpu_s, **more}


def test_overlap_ratio_is_relative_to_longer_phase():
    assert overlap_of(timed(10, 10), timed(5, 5), timed(10, 15), 2)["ratio"] == 1.0
    assert overlap_of(timed(10, 10), timed(5, 5), timed(15, 15), 2)["ratio"] == 1.5
    assert overlap_of(timed(5, 5), timed(10, 10), timed(10, 15), 2)["one_after_the_other_ratio"] == 1.5


def test_overlap_bound_includes_total_cpu_time():
    found = overlap_of(timed(10, 20), timed(5, 10), timed(15, 30), 2)
    assert found["cpu_bound_s"] == 15.0 and found["over_cpu_bound"] == 1.0 and found["ratio"] == 1.5
    idle = overlap_of(timed(10, 2), timed(5, 2), timed(11, 4), 2)  # here, the longer phase is the bound
    assert idle["over_cpu_bound"] == idle["ratio"] == 1.1


def test_variants_share_one_generation_baseline():
    found = {"generation": [timed(8, 16), timed(10, 20), timed(30, 20)]}
    for variant, judged_s in (("generated", 1), ("canonical", 4)):
        found[f"judging {variant}"] = [timed(judged_s, 2 * judged_s)]
        found[f"whole {variant}"] = [timed(10 + judged_s, 22, tail_s=0.5)]
    summary = summary_of(found, num_problems=164, num_cpus=2)
    assert summary["generation"]["wall_s"] == 10
    assert summary["generated"]["ratio"] == 1.1 and summary["canonical"]["ratio"] == 1.4
    assert summary["canonical"]["problems_per_s"] == pytest.approx(164 / 14)


def test_each_round_requests_only_its_phase(tmp_path):
    rounds = WorkerRounds(load_eval_config("humaneval"), tmp_path)
    assert rounds.num_problems == 164
    generation = rounds.batch_for("generation", "")
    assert generation.needs_engine and generation.judged == {key_of(each) for each in generation.requests}
    rounds._answers = {key_of(each): GeneratedAnswer("no program", 3, False) for each in generation.requests}
    judging = rounds.batch_for("judging", "canonical")
    assert not judging.needs_engine and not judging.judged
    assert all("def " in answer.text for answer in judging.answers.values())
    whole = rounds.batch_for("whole", "generated")
    assert whole.needs_engine and not whole.answers and not whole.judged


def test_multiple_batches_are_rejected(tmp_path):
    with pytest.raises(UserError, match="batch_size"):
        WorkerRounds(load_eval_config("humaneval", ["batch_size=100"]), tmp_path)


def test_replacing_engine_changes_only_answer_text():
    generated = GeneratedAnswer("wrong", 7, True)
    requests = [GenerateRequest(name, "?") for name in "abc"]
    answers = list(zip(requests, [generated, generated, replace(generated, error="too long")]))
    engine = MagicMock(protocol={}, seconds={})
    engine.answers.side_effect = lambda *_: iter(answers)
    replacing = ReplacingEngine(engine, {"a": "right", "c": "right"})
    found = [answer for _, answer in replacing.answers(requests, SamplingConfig())]
    assert found == [replace(generated, text="right"), generated, replace(generated, text="right")]
    assert list(ReplacingEngine(engine, {}).answers(requests, SamplingConfig())) == answers


def test_round_events_record_answers_and_failures():
    batch, events = BatchId(claim=1, number=0), RoundEvents()
    events.add(AnswerReceived(batch, ("a", 0), GeneratedAnswer("x", 1, False)))
    events.add(BatchFailed(batch, "no room"))
    assert list(events.answers) == [("a", 0)] and events.failure == "no room"
    events.add(BatchLost(batch, "the engine died"))
    assert events.failure == "the engine died"


def test_command_timing_uses_file_times(tmp_path):
    work = tmp_path / "work/humaneval"
    work.mkdir(parents=True)
    seconds = {"import_s": 4.0, "load_s": 2.0}
    result = DatasetResult({"num_problems": 164}, {}, tier=1, protocol={}, isolation="bwrap", seconds=seconds)
    model = EvaluatedModel("m", None, tmp_path, "m", "digest", {"humaneval": result})
    times = {work / "protocol-1.json": 108.0, work / "verdicts-1.jsonl": 112.0, tmp_path / "metrics.json": 112.5}
    for path, moment in times.items():
        path.write_text(json.dumps(model.to_json()))
        os.utime(path, (moment, moment))
    parts = parts_of(tmp_path, started=100.0, ended=113.0)
    assert parts["start_s"] + parts["answering_s"] + parts["writing_s"] == parts["total_s"] == 12.5
    assert (parts["start_s"], parts["exit_s"]) == (8.0, 0.5)
    assert parts["problems_per_s"] == 164 / 12.5
