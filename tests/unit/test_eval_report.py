"""The report of a synthetic run, and the W&B records, read from their files."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import wandb
from PIL import Image

from eval_pipeline import publish
from eval_pipeline.checkpoints import EvalDir
from eval_pipeline.engines import GeneratedAnswer
from eval_pipeline.judge import ReferenceAnswer, Verdict
from eval_pipeline.problems.problem import Problem
from eval_pipeline.publish import log_to_wandb
from eval_pipeline.report.metrics import JudgedAnswer, rate_intervals, summarize
from eval_pipeline.report.plots import loss_history
from eval_pipeline.report.report import write_report
from eval_pipeline.report.results import (
    DatasetResult,
    EvaluatedModel,
    published_models,
    qa_row,
    write_evaluation,
    write_qa_log,
    write_verdicts,
)
from eval_pipeline.report.selection import select_best, write_best_checkpoint
from tests.helpers.wandb_files import read_records, values_of
from verl_ext.errors import UserError
from verl_ext.metrics.jsonl import MetricsFile

ISOLATION = "bwrap"


def answer_all(dataset: str, share: float, num_problems: int, num_samples: int) -> list[JudgedAnswer]:
    rng = random.Random(f"{dataset}{share}")
    answers = []
    for number in range(num_problems):
        for sample in range(num_samples):
            draw = rng.random()
            kind = "success" if draw < share / 2 else "wrong_answer" if draw < share else "timeout"
            problem = Problem(f"{dataset}/{number}", "p|rompt \ud800", ReferenceAnswer("1"))
            verdict = Verdict(kind, int(kind == "success"), 1, judge_time=0.5)
            answers.append(JudgedAnswer(problem, sample, GeneratedAnswer("text", 7, False), verdict))
    return answers


def evaluate(
    run_dir: Path, step: int | None, share: float, *datasets: str, samples: int = 1, problems: int = 40
) -> EvaluatedModel:
    """An evaluated model with its files on disk."""
    label = "base" if step is None else f"step_{step}"
    path = run_dir / ("base" if step is None else f"global_step_{step}")
    path.mkdir(parents=True)
    results = {}
    for dataset in datasets:
        answers = answer_all(dataset, share, problems, samples)
        write_verdicts(run_dir / "eval" / f"eval_{label}", dataset, answers)
        protocol = {"sampling": {"temperature": 0.0}, "problems": dataset}
        results[dataset] = DatasetResult(
            summarize(answers, 1.0), rate_intervals(answers), 1, protocol, ISOLATION, {"judge_s": 1.0}
        )
    model = EvaluatedModel(label, step, path, str(path / "huggingface"), "w", results)
    write_evaluation(run_dir / "eval" / f"eval_{label}", model)
    return model


def report(
    run_dir: Path,
    rows: list[dict[str, Any]],
    baseline: str = "base",
    settings: dict[str, dict[str, Any]] | None = None,
    **arguments: Any,
) -> tuple[str, dict[str, Any], Path]:
    """Select the best checkpoint and write the report from files only.

    Args:
        rows: rows of `metrics.jsonl`.
        settings: settings of each dataset that selects; by default, any settings of all datasets.
        arguments: further arguments of `write_report`.
    """
    log = MetricsFile(run_dir / "metrics.jsonl", attempt=1)
    for row in rows:
        log.append(row["step"], {name: value for name, value in row.items() if name != "step"})
    log.close()
    history = [model for model in published_models(run_dir / "eval") if model.step is not None]
    choice = select_best(history, settings or {name: {} for model in history for name in model.datasets})
    assert choice is not None
    write_best_checkpoint(run_dir, choice, history)
    path = write_report(EvalDir(run_dir / "eval", run_dir), baseline, **arguments)
    return path.read_text(), json.loads((path.parent / "comparison_data.json").read_text()), path.parent


def plots(directory: Path) -> list[str]:
    names = sorted(path.name for path in directory.glob("*.png"))
    for name in names:
        with Image.open(directory / name) as image:
            assert image.format == "PNG" and image.width > 800
            assert len(image.convert("RGB").getcolors(1 << 20)) > 50  # something is drawn
    return names


ALL_PLOTS = ["error_distribution.png", "loss_against_success.png", "rates_over_steps.png"]


def test_report_is_built_from_files_only(tmp_path: Path) -> None:
    evaluate(tmp_path, None, 0.2, "x", "y")
    for step, share in ((10, 0.5), (20, 0.9), (100, 0.7)):
        evaluate(tmp_path, step, share, "x", "y")
    steps = (5, 10, 20, 100)
    rows = [{"step": step, "train/loss": 9.0, **({"val/loss": 2.0 / step} if step > 5 else {})} for step in steps]
    text, data, directory = report(tmp_path, rows)

    assert plots(directory) == ALL_PLOTS
    assert all(f"]({name})" in text for name in ALL_PLOTS)
    assert text.startswith("# step_20 against the base model\n")
    assert "largest `exec_success_rate` on `x`, `y` of 3 comparable checkpoints" in text
    assert "40 problems with one answer each; p from McNemar's exact test." in text
    assert "| `isolation` | bwrap | bwrap |" in text and "| `sampling.temperature` | 0.0 | 0.0 |" in text
    assert "| `problems` | x (x); y (y) | x (x); y (y) |" in text
    assert "different settings" not in text and "biased upwards" in text

    found = data["comparisons"]["x"]["exec_success_rate"]
    low, high = found["interval"]
    row = next(line for line in text.splitlines() if line.startswith("| `exec_success_rate`"))
    assert f"| {found['difference']:+.4f} [{low:+.4f}, {high:+.4f}] | < 0.0001 |" in row
    base, best = (data[name]["datasets"]["x"]["exec_success_rate"] for name in ("baseline", "best"))
    assert found["difference"] == pytest.approx(best - base)
    assert found["both"] + found["only_a"] == round(base * 40) and found["both"] + found["only_b"] == round(best * 40)
    assert data["loss"] == {"name": "val/loss", "by_step": {"10": 0.2, "20": 0.1, "100": 0.02}}
    assert [model["step"] for model in data["history"]] == [10, 20, 100]


def test_baseline_may_be_a_checkpoint_of_the_run(tmp_path: Path) -> None:
    for step, share in ((10, 0.5), (20, 0.9)):
        evaluate(tmp_path, step, share, "x")
    text, data, directory = report(tmp_path, [], "step_10")
    assert text.startswith("# step_20 against step_10\n") and "- Baseline: `step_10`, loaded from" in text
    assert "| metric | step_10 | best checkpoint |" in text and "base model" not in text
    assert data["baseline"]["label"] == "step_10" and plots(directory) == ALL_PLOTS[::2]


@pytest.mark.parametrize(("num_checkpoints", "datasets"), [(1, "w"), (2, "wxyz"), (30, "wxyz")])
def test_report_handles_few_and_many_checkpoints_and_datasets(
    tmp_path: Path, num_checkpoints: int, datasets: str
) -> None:
    evaluate(tmp_path, None, 0.3, *datasets[:3])  # the last of four datasets is not evaluated
    for number in range(num_checkpoints):
        last = number == num_checkpoints - 1
        evaluate(tmp_path, 500 * (number + 1), 0.3 + 0.6 * number / 30, *(datasets if last else datasets[:2]))
    text, _, directory = report(tmp_path, [{"step": 500, "train/loss": 3.0}, {"step": 1000, "train/loss": 0.1}])
    assert plots(directory) == ALL_PLOTS
    assert ("only one of the two models was evaluated on it" in text) == (num_checkpoints > 1)
    assert "of one comparable checkpoint" in text and "biased upwards" not in text  # the others lack datasets


def test_report_on_one_problem(tmp_path: Path) -> None:
    evaluate(tmp_path, None, 0.2, "x", problems=1)
    evaluate(tmp_path, 10, 0.8, "x", problems=1)
    assert "One problem with one answer; p from" in report(tmp_path, [])[0]


def test_report_handles_several_samples_and_no_loss(tmp_path: Path) -> None:
    evaluate(tmp_path, None, 0.2, "x", samples=5)
    evaluate(tmp_path, 10, 0.8, "x", samples=5)
    text, data, directory = report(tmp_path, [{"step": 10, "train/loss": math.nan}])
    assert plots(directory) == ["error_distribution.png", "rates_over_steps.png"]
    assert "the run recorded no loss" in text and data["loss"] is None
    assert "5 answers each; p from sign-flip permutation test" in text and "`pass_at_5`" in text
    assert data["comparisons"]["x"]["accepted_at_1"]["both"] is None


def test_report_handles_missing_losses_and_extreme_rates(tmp_path: Path) -> None:
    evaluate(tmp_path, None, 0.0, "x", "y")
    evaluate(tmp_path, 10, 0.0, "x")
    evaluate(tmp_path, 20, 1.0, "x", "y")
    text, data, directory = report(tmp_path, [{"step": 15, "val/loss": 0.7}, {"step": 20, "val/loss": 0.5}])
    assert plots(directory) == ALL_PLOTS and data["loss"]["by_step"] == {"10": None, "20": 0.5}
    assert "| 1.0000 [0.9124, 1.0000] | +1.0000 [" in text


def test_report_names_different_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate(tmp_path, None, 0.2, "x")
    monkeypatch.setattr(f"{__name__}.ISOLATION", "sandlock")
    evaluate(tmp_path, 10, 0.8, "x")
    text, _, _ = report(tmp_path, [])
    assert "different settings on `x`" in text and "| `isolation` | bwrap | sandlock |" in text


def test_checkpoints_with_other_settings_are_neither_counted_nor_plotted(tmp_path: Path) -> None:
    evaluate(tmp_path, None, 0.2, "x", "y")
    for step, share in ((10, 0.5), (20, 0.9)):
        evaluate(tmp_path, step, share, "x", "y")
    other = evaluate(tmp_path, 30, 1.0, "x")
    protocol = {"sampling": {"temperature": 1.0}, "problems": "x"}
    result = replace(other.datasets["x"], protocol=protocol)
    write_evaluation(tmp_path / "eval" / "eval_step_30", replace(other, datasets={"x": result}))
    settings = {"x": {"sampling": {"temperature": 0.0}}}  # `y` does not select
    text, data, _ = report(tmp_path, [{"step": 30, "val/loss": 1.0}], settings=settings)
    assert text.startswith("# step_20 against") and "`x` of 2 comparable checkpoints" in text
    assert "The plots omit results with other settings: `step_30` on `x`." in text
    assert [(model["step"], [*model["datasets"]]) for model in data["history"]] == [(10, ["x", "y"]), (20, ["x", "y"])]
    assert data["loss"] is None


def test_exec_success_rate_of_answers_that_are_not_run_is_omitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, list[str]]] = []  # title of each figure, and the labels of its lines and axes

    def record(figure: Any, path: Path) -> Path:
        texts = [text for axes in figure.axes for text in (*axes.get_legend_handles_labels()[1], axes.get_ylabel())]
        drawn.append((figure.get_suptitle(), texts))
        return path

    monkeypatch.setattr("eval_pipeline.report.plots.write_figure", record)
    for step, share in ((None, 0.2), (10, 0.5), (20, 0.9)):
        evaluate(tmp_path, step, share, "math")
    rows = [{"step": step, "val/loss": 1.0 / step} for step in (10, 20)]
    text, data, _ = report(tmp_path, rows, not_run=["math"])
    assert "counted in `accepted_at_1`" in text and "| `exec_success_rate`" not in text
    assert "counted in `exec_success_rate`" not in text and [*data["comparisons"]["math"]] == ["accepted_at_1"]
    rates, _, losses = drawn
    assert "accepted_at_1" in rates[1] and "exec_success_rate" not in rates[1]
    assert losses[0].startswith("accepted_at_1 against val/loss") and "accepted_at_1" in losses[1]


def test_incomparable_models_are_rejected(tmp_path: Path) -> None:
    evaluate(tmp_path / "a", None, 0.2, "x")
    evaluate(tmp_path / "a", 10, 0.8, "y")
    with pytest.raises(UserError, match="evaluate both on a common dataset"):
        report(tmp_path / "a", [])
    evaluate(tmp_path / "b", None, 0.2, "x")
    evaluate(tmp_path / "b", 10, 0.8, "x", problems=39)
    with pytest.raises(UserError, match="base and step_10 cannot be compared on x: .*'x/39'"):
        report(tmp_path / "b", [])
    (tmp_path / "b" / "eval" / "eval_base" / "verdicts" / "x.jsonl").unlink()
    with pytest.raises(UserError, match="verdicts of base on x are missing"):
        report(tmp_path / "b", [])


def test_loss_is_from_last_attempt_at_evaluated_steps() -> None:
    rows = [{"step": 1, "train/loss": 5.0}, {"step": 2, "train/loss": 4.0}, {"step": 2, "train/loss": 3.0}]
    losses = loss_history(rows, {2, 50})
    assert losses is not None and (losses.name, losses.values) == ("train/loss", {2: 3.0})
    validated = [*rows, {"step": 2, "val/loss": 1.0}, {"step": 3, "val/loss": math.inf}]
    assert loss_history(validated, {2}).name == "val/loss"
    assert loss_history(validated, {1, 2}).name == "train/loss"  # that of validation was measured at fewer steps
    assert loss_history([{"step": 1, "time/save_s": 1.0}], {1}) is None


# W&B


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without any W&B configuration."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb_config"))
    monkeypatch.chdir(tmp_path)
    wandb.teardown()
    yield
    wandb.teardown()


def test_wandb_gets_metrics_intervals_and_table(tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = evaluate(tmp_path, 30, 0.5, "x", "y", problems=4)
    directory = EvalDir(tmp_path / "eval", tmp_path)
    for dataset, answers in {"x": answer_all("x", 0.5, 4, 1), "y": []}.items():
        write_qa_log(directory.results_of("step_30"), dataset, answers)
    trainer = {"project_name": "p", "experiment_name": "sft", "wandb_proxy": "http://127.0.0.1:9"}
    (tmp_path / "config.yaml").write_text(json.dumps({"trainer": trainer}))
    (tmp_path / "wandb_run_id.txt").write_text("abc\n")
    opened = Mock(wraps=publish.open_wandb_run)
    monkeypatch.setattr(publish, "open_wandb_run", opened)
    log_to_wandb(directory, model)
    assert opened.call_args.kwargs["proxy"] == "http://127.0.0.1:9"

    [path] = tmp_path.glob("wandb/offline-run-*/run-abc-step_30.wandb")
    records = read_records(path)
    [run] = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    assert (run.display_name, run.project, run.run_group, run.job_type) == ("phase1_eval_step_30", "p", "sft", "eval")
    assert values_of(run.config.update)["step"] == 30

    [history] = [values_of(r.history.item) for r in records if r.WhichOneof("record_type") == "history"]
    result = model.datasets["x"]
    assert history["global_step"] == 30
    assert history["eval/x/exec_success_rate"] == result.metrics["exec_success_rate"]
    bounds = (history["eval/x/exec_success_rate_low"], history["eval/x/exec_success_rate_high"])
    assert bounds == pytest.approx(result.intervals["exec_success_rate"])
    assert "eval/y/accepted_at_1" in history and not any(name.startswith("eval/y/qa") for name in history)
    summary: dict[str, Any] = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            summary.update(values_of(record.summary.update))
    assert summary["step"] == 30

    table = json.loads((path.parent / "files" / history["eval/x/qa/path"]).read_text())
    assert table["columns"] == list(qa_row(answer_all("x", 0.5, 4, 1)[0])) and len(table["data"]) == 4
    assert table["data"][0][table["columns"].index("prompt")] == "p|rompt \\ud800"


def test_wandb_failure_only_warns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, offline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    model = evaluate(tmp_path, 3, 0.5, "x", problems=2)
    monkeypatch.setattr("wandb.sdk.wandb_run.Run.log", refuse)
    write_qa_log(tmp_path / "eval" / "eval_step_3", "x", [])
    log_to_wandb(EvalDir(tmp_path / "eval", tmp_path), model)
    assert "warning: logging to W&B failed (RuntimeError: no room)" in capsys.readouterr().err
