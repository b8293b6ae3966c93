"""Figures against values worked out by hand, and the files they end up in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval_pipeline import tracking
from eval_pipeline.checkpoint import Checkpoint
from eval_pipeline.engine import Answer
from eval_pipeline.metrics import summarize
from eval_pipeline.problems import Problem
from eval_pipeline.report import format_table, prepare_output, write_metrics, write_qa_log
from eval_pipeline.run_config import RunConfig
from eval_pipeline.verdict import Verdict
from verl_ext.errors import UserError

VERDICTS = [
    Verdict("success", 4, 4, judge_s=1.0),
    Verdict("wrong_answer", 1, 4, judge_s=2.0),
    Verdict("timeout", 2, 4, judge_s=5.0),
    Verdict("api_error", 0, 4),
]
ANSWERS = [Answer("a", 10, False), Answer("b", 20, True), Answer("c", 30, False), Answer("", 0, False, "too long")]


def test_figures_by_hand() -> None:
    assert summarize(ANSWERS, VERDICTS, elapsed_s=8.0) == pytest.approx(
        {
            "num_problems": 4,
            "exec_success_rate": 0.5,
            "accepted_at_1": 0.25,
            "pass_ratio_mean": 0.4375,
            "pass_ratio_p50": 0.375,
            "pass_ratio_p90": 0.85,  # between 0.5 and 1.0, at 0.9 * 3 = 2.7
            "success_rate": 0.25,
            "wrong_answer_rate": 0.25,
            "syntax_error_rate": 0.0,
            "runtime_error_rate": 0.0,
            "timeout_rate": 0.25,
            "api_error_rate": 0.25,
            "avg_gen_tokens": 15.0,
            "avg_judge_time": 2.0,
            "cost_per_solved_tokens": 60.0,
            "cost_per_solved_judge_time": 8.0,
            "throughput": 0.5,
            "truncation_rate": 0.25,
        }
    )


def test_cost_per_solved_does_not_exist_when_nothing_is_solved() -> None:
    figures = summarize(ANSWERS[1:], VERDICTS[1:], elapsed_s=1.0)
    assert figures["cost_per_solved_tokens"] is figures["cost_per_solved_judge_time"] is None
    assert tracking.wandb_figures("d", figures).keys().isdisjoint({"eval/d/cost_per_solved_tokens"})
    assert format_table("d", figures).splitlines()[-3].split() == ["cost_per_solved_judge_time", "-"]


def test_answers_and_verdicts_must_match() -> None:
    with pytest.raises(ValueError, match="4 answers and 3 verdicts"):
        summarize(ANSWERS, VERDICTS[1:], elapsed_s=1.0)


def test_qa_log_holds_every_problem_and_any_text(tmp_path: Path) -> None:
    problem = Problem("p", "写 f\ud800", "f", ("assert f()",))
    prepare_output(tmp_path / "out")
    path = write_qa_log(tmp_path / "out", "quick", [problem], ANSWERS[:1], ["code"], VERDICTS[:1])
    assert path == tmp_path / "out" / "qa_logs" / "quick_qa.jsonl"
    row = json.loads(path.read_text(encoding="utf-8"))
    assert (row["prompt"], row["answer"], row["code"], row["error_type"]) == (problem.prompt, "a", "code", "success")


def test_old_metrics_go_before_a_new_evaluation_begins(tmp_path: Path) -> None:
    prepare_output(tmp_path)
    write_metrics(tmp_path, {"step": 1})
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"step": 1}
    prepare_output(tmp_path)
    assert not (tmp_path / "metrics.json").exists()


def test_output_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output"):
        prepare_output(tmp_path / "file" / "out")


def test_wandb_that_fails_only_warns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class BrokenRun:
        def log(self, row: dict[str, float]) -> None:
            raise RuntimeError(f"no room for {row['global_step']}")

    monkeypatch.setattr("verl_ext.metrics.wandb_run.open_wandb_run", lambda **_: BrokenRun())
    checkpoint = Checkpoint(tmp_path, tmp_path, run_dir=tmp_path, step=3)
    tracking.log_to_wandb(checkpoint, RunConfig(), tmp_path, {"step": 3}, {"eval/d/accepted_at_1": 0.5})
    assert "warning: W&B" in capsys.readouterr().err
