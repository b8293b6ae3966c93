"""Metrics, intervals and comparisons, against hand computation, scipy and simulation; and their files."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from eval_pipeline.engines import GeneratedAnswer
from eval_pipeline.judge import ERROR_TYPES, ErrorType, ReferenceAnswer, Verdict
from eval_pipeline.problems.problem import Problem
from eval_pipeline.report.comparison import compare_models, paired_interval
from eval_pipeline.report.metrics import (
    RATES,
    JudgedAnswer,
    pass_at_k,
    rate_intervals,
    summarize,
    wilson,
    wilson_clustered,
)
from eval_pipeline.report.report import format_table
from eval_pipeline.report.results import (
    DatasetResult,
    EvaluatedModel,
    qa_row,
    read_evaluation,
    read_outcomes,
    sample_answers,
    write_evaluation,
    write_qa_log,
    write_verdicts,
)
from eval_pipeline.report.selection import read_best_checkpoint, select_best, write_best_checkpoint
from verl_ext.checkpoint.retention import read_best_file
from verl_ext.errors import UserError
from verl_ext.significance import mcnemar_exact

SURROGATE = "写 \ud800"


def judged(
    problem_id: str, kind: ErrorType, passed: int = 0, sample: int = 0, tokens: int = 10, truncated: bool = False
) -> JudgedAnswer:
    problem = Problem(problem_id, SURROGATE, ReferenceAnswer("1"))
    verdict = Verdict(kind, 4 if kind == "success" else passed, 4, judge_time=2.0)
    return JudgedAnswer(problem, sample, GeneratedAnswer("text", tokens, truncated), verdict)


FOUR = [
    judged("a", "success", tokens=10),
    judged("b", "wrong_answer", 1, tokens=20, truncated=True),
    judged("c", "timeout", 2, tokens=30),
    judged("d", "api_error", tokens=0),
]
# two problems, four answers each
SAMPLED = [judged("a", "success" if n < 3 else "wrong_answer", sample=n) for n in range(4)] + [
    judged("b", "success" if n < 1 else "timeout", sample=n) for n in range(4)
]


X = {"x": {"n": 1}}
"""The settings that checkpoints are compared under."""


def result(rate: float, num_problems: int = 100, tier: int = 1, **metrics: Any) -> DatasetResult:
    rates = {"exec_success_rate": rate, "accepted_at_1": rate / 2}
    intervals = {name: wilson(value * num_problems, num_problems) for name, value in rates.items()}
    return DatasetResult({"num_problems": num_problems, **rates, **metrics}, intervals, tier, {"n": 1}, "bwrap")


def checkpoint(run_dir: Path, step: int, exists: bool = True, **datasets: DatasetResult) -> EvaluatedModel:
    path = run_dir / f"global_step_{step}"
    if exists:
        path.mkdir()
    return EvaluatedModel(f"step_{step}", step, path, str(path / "huggingface"), "w", datasets)


# metrics


def test_metrics_equal_hand_computation() -> None:
    assert summarize(FOUR, elapsed_s=8.0) == pytest.approx(
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


def test_metrics_of_several_samples_equal_hand_computation() -> None:
    metrics = summarize(list(reversed(SAMPLED)), elapsed_s=4.0)
    expected = {
        "num_problems": 2,
        "num_samples": 4,
        "accepted_at_1": 0.5,
        "pass_at_1": 0.5,  # (3/4 + 1/4) / 2
        "pass_at_4": 1.0,
        "exec_success_rate": 5 / 8,
        "timeout_rate": 3 / 8,
        "pass_ratio_p50": 0.5,  # between the problems' means 3/4 and 1/4
        "cost_per_solved_tokens": 20.0,
        "throughput": 0.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "pass_at_5" not in metrics and "pass_at_1" not in summarize(FOUR, 1.0)


def test_undefined_metrics_are_none_and_shown_as_dash() -> None:
    metrics = summarize(FOUR[1:], elapsed_s=0.0)
    absent = ("cost_per_solved_tokens", "cost_per_solved_judge_time", "throughput")
    assert all(metrics[name] is None for name in absent)
    table = format_table({"x": DatasetResult(metrics, rate_intervals(FOUR[1:]), 1, {}, "bwrap")})
    cells = dict(line.split(maxsplit=1) for line in table.splitlines()[1:])
    assert all(cells[name] == "-" for name in absent)
    assert cells["timeout_rate"] == "0.3333 [0.0615, 0.7923]"


@pytest.mark.parametrize(
    ("answers", "message"),
    [([], "at least one"), (FOUR + FOUR[:1], "occurs twice"), (SAMPLED[:7], r"not \[3, 4\]")],
)
def test_inconsistent_answers_are_rejected(answers: list[JudgedAnswer], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        summarize(answers, elapsed_s=1.0)


def test_pass_at_k_equals_definition() -> None:
    for n, c, k in product(range(1, 9), range(9), range(1, 9)):
        if c <= n and k <= n:
            assert pass_at_k(n, c, k) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k))
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)  # binomials beyond any float
    with pytest.raises(ValueError):
        pass_at_k(3, 1, 4)


# intervals


@pytest.mark.parametrize(("k", "n"), [(0, 1), (0, 164), (1, 4), (82, 164), (163, 164), (164, 164)])
def test_wilson_interval_equals_scipy(k: int, n: int) -> None:
    expected = binomtest(k, n).proportion_ci(method="wilson")
    assert wilson(k, n) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert wilson(k, n)[0] <= k / n <= wilson(k, n)[1]


def test_every_rate_lies_in_its_interval() -> None:
    for answers in (FOUR, SAMPLED):
        metrics, intervals = summarize(answers, 1.0), rate_intervals(answers)
        assert RATES.keys() <= intervals.keys() <= metrics.keys()
        assert all(0 <= low <= metrics[name] <= high <= 1 for name, (low, high) in intervals.items())
    assert rate_intervals(FOUR)["accepted_at_1"] == wilson(1, 4)


def test_identical_samples_count_as_one() -> None:
    alike = np.array([1.0] * 30 + [0.0] * 70)
    assert wilson_clustered(alike, 10) == wilson(30, 100)
    assert wilson_clustered([1.0] * 100, 10) == wilson(100, 100)
    independent = np.random.default_rng(0).binomial(10, 0.3, size=400) / 10
    low, high = wilson_clustered(independent, 10)
    assert high - low == pytest.approx(np.subtract(*wilson(independent.mean() * 4000, 4000)[::-1]), rel=0.15)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.9])
@pytest.mark.parametrize("alikeness", [0.05, 0.4, 0.9])
def test_clustered_intervals_have_nominal_coverage(rate: float, alikeness: float) -> None:
    rng = np.random.default_rng(1)
    spread = (1 - alikeness) / alikeness  # beta-binomial answers with this correlation within a problem
    chances = rng.beta(rate * spread, (1 - rate) * spread, size=(1000, 117))
    runs = rng.binomial(10, chances) / 10
    clustered = np.mean([low <= rate <= high for low, high in (wilson_clustered(run, 10) for run in runs)])
    assert 0.93 <= clustered <= 0.985
    naive = np.mean([low <= rate <= high for low, high in (wilson(run.mean() * 1170, 1170) for run in runs)])
    assert naive < clustered


# comparison


def outcomes(*kinds: ErrorType) -> dict[str, tuple[ErrorType, ...]]:
    return {f"p{number}": (kind,) for number, kind in enumerate(kinds)}


def test_comparison_equals_hand_computation() -> None:
    base = outcomes("success", "success", "timeout", "timeout", "timeout", "wrong_answer")
    best = outcomes("success", "timeout", "success", "success", "success", "timeout")
    found = compare_models(base, best)
    accepted, ran = found["accepted_at_1"], found["exec_success_rate"]
    assert (accepted.both, accepted.only_a, accepted.only_b, accepted.neither) == (1, 1, 3, 1)
    assert (ran.both, ran.only_a, ran.only_b, ran.neither) == (1, 2, 3, 0)
    assert accepted.difference == pytest.approx(2 / 6)
    assert accepted.p_value == pytest.approx(10 / 16)  # 2 * (1 + 4) / 2^4
    assert accepted.interval[0] < accepted.difference < accepted.interval[1]


def test_mcnemar_of_equal_models_and_of_constant_winner() -> None:
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(0, 10) == pytest.approx(2 / 2**10)
    same = compare_models(outcomes("success", "timeout"), outcomes("success", "timeout"))["accepted_at_1"]
    assert same.p_value == 1.0 and same.interval[0] < 0 < same.interval[1]


def test_several_samples_are_compared_per_problem() -> None:
    base = {f"p{n}": ("timeout", "timeout") for n in range(5)}
    best = {f"p{n}": ("success", "success" if n else "timeout") for n in range(5)}
    found = compare_models(base, best)["accepted_at_1"]
    assert (found.both, found.only_a, found.num_samples) == (None, None, 2)
    assert found.difference == pytest.approx(0.9)
    assert found.p_value == pytest.approx(2 / 2**5)  # all signs one way or all the other


def test_duplicated_samples_give_mcnemar_p_value() -> None:
    rng = np.random.default_rng(3)
    kinds = np.array(["success", "timeout"])
    base, best = (outcomes(*kinds[rng.integers(2, size=12)]) for _ in range(2))
    doubled = compare_models(*({name: kind * 2 for name, kind in side.items()} for side in (base, best)))
    assert doubled["accepted_at_1"].p_value == pytest.approx(compare_models(base, best)["accepted_at_1"].p_value)


@pytest.mark.parametrize("cells", [(0.5, 0.05, 0.15, 0.3), (0.2, 0.2, 0.2, 0.4), (0.9, 0.02, 0.03, 0.05)])
def test_difference_intervals_have_nominal_coverage(cells: tuple[float, ...]) -> None:
    values = np.array([0.0, -1.0, 1.0, 0.0])  # both, only a, only b, neither
    runs = np.random.default_rng(2).choice(values, p=cells, size=(1000, 117))
    truth = float(values @ cells)
    held = np.mean([low <= truth <= high for low, high in map(paired_interval, runs)])
    assert 0.93 <= held <= 0.985


def test_comparison_of_different_problems_is_rejected() -> None:
    with pytest.raises(UserError, match="1 problems .*'p1'"):
        compare_models(outcomes("success"), outcomes("success", "timeout"))
    with pytest.raises(UserError, match="num_samples"):
        compare_models({"p": ("success",)}, {"p": ("success", "success")})


# the choice


def test_best_checkpoint_file_is_read_by_rotation(tmp_path: Path) -> None:
    evaluated = [checkpoint(tmp_path, step, x=result(rate)) for step, rate in ((10, 0.2), (20, 0.8), (30, 0.5))]
    choice = select_best(evaluated, X)
    assert choice is not None and (choice.best.step, choice.value) == (20, 0.8)
    write_best_checkpoint(tmp_path, choice, evaluated)
    assert read_best_file(tmp_path) == (tmp_path / "global_step_20", None)
    content = json.loads((tmp_path / "best_checkpoint.json").read_text())
    assert content["checkpoint"] == "global_step_20" and content["export"].endswith("global_step_20/huggingface")
    assert (content["metric"], content["mode"], content["datasets"]) == ("exec_success_rate", "max", ["x"])
    assert content["interval"] == pytest.approx(wilson(80, 100))
    assert [(entry["step"], entry["value"]) for entry in content["checkpoints"]] == [(10, 0.2), (20, 0.8), (30, 0.5)]
    assert content["checkpoints"][2]["datasets"]["x"]["accepted_at_1"] == 0.25
    best = read_best_checkpoint(tmp_path)
    assert (best.step, best.datasets, best.settings) == (20, ("x",), X)


def test_tie_for_best_selects_newer_checkpoint(tmp_path: Path) -> None:
    evaluated = [checkpoint(tmp_path, step, x=result(0.5)) for step in (30, 10, 20)]
    assert [select_best(evaluated, X, mode=mode).best.step for mode in ("max", "min")] == [30, 30]


def test_removed_or_unmeasured_checkpoints_are_not_selected(tmp_path: Path) -> None:
    evaluated = [
        checkpoint(tmp_path, 10, x=result(0.1, cost=5.0)),
        checkpoint(tmp_path, 20, exists=False, x=result(0.9, cost=1.0)),
        checkpoint(tmp_path, 30, x=result(0.05, cost=None)),
        checkpoint(tmp_path, 40, x=result(0.05, cost=math.nan)),
        EvaluatedModel("base", None, tmp_path, "base", "w", {"x": result(1.0, cost=0.0)}),
    ]
    by_rate, by_cost = select_best(evaluated, X), select_best(evaluated, X, "cost", "min")
    assert by_rate.best.step == by_cost.best.step == 10
    assert by_rate.values[20] == 0.9 and by_cost.values[40] is None and by_cost.interval is None
    assert select_best(evaluated[1:2], X) is None
    with pytest.raises(UserError, match="selection.metric is 'speed'"):
        select_best(evaluated, X, "speed")


def test_other_protocol_excludes_checkpoint_from_selection(tmp_path: Path) -> None:
    evaluated = [checkpoint(tmp_path, step, x=result(rate)) for step, rate in ((10, 0.2), (20, 0.1))]
    other = replace(result(0.9), protocol={"n": 2, "batch_size": 1})
    choice = select_best([*evaluated, checkpoint(tmp_path, 30, x=other)], X)
    assert (choice.best.step, choice.values) == (10, {10: 0.2, 20: 0.1, 30: None})
    assert select_best([checkpoint(tmp_path, 40, x=other)], {"x": {"n": 2}}).best.step == 40


@pytest.mark.parametrize("order", [1, -1])
def test_partial_copy_of_result_does_not_restrict_selection(tmp_path: Path, order: int) -> None:
    whole = checkpoint(tmp_path, 10, x=result(0.2), y=result(0.4))
    evaluated = [whole, replace(whole, datasets={"x": whole.datasets["x"]})]
    choice = select_best(evaluated[::order], {"x": {"n": 1}, "y": {"n": 1}})
    assert (choice.best.step, choice.datasets, choice.value) == (10, ("x", "y"), pytest.approx(0.3))
    assert choice.partial == ()


def test_checkpoint_that_lacks_a_dataset_is_not_compared(tmp_path: Path) -> None:
    evaluated = [
        checkpoint(tmp_path, 10, x=result(0.6), y=result(0.9)),
        checkpoint(tmp_path, 20, x=result(0.7), y=result(0.2)),
        checkpoint(tmp_path, 30, x=result(0.9)),
        checkpoint(tmp_path, 40, exists=False, x=result(0.9)),
    ]
    choice = select_best(evaluated, {"x": {"n": 1}, "y": {"n": 1}})
    assert (choice.best.step, choice.datasets, choice.partial) == (10, ("x", "y"), ("step_30",))
    assert (choice.values[10], choice.values[30]) == (pytest.approx(0.75), None)


def test_selection_uses_shared_datasets_if_no_checkpoint_has_all(tmp_path: Path) -> None:
    evaluated = [
        checkpoint(tmp_path, 10, x=result(0.5, 100), y=result(0.9, 300), z=result(0.9), big=result(0.1, tier=2)),
        checkpoint(tmp_path, 20, x=result(0.9, 100), y=result(0.5, 300), big=result(0.9, tier=2)),
    ]
    settings = {name: {"n": 1} for name in ("x", "y", "z", "failed")}
    choice = select_best(evaluated, settings)
    assert (choice.best.step, choice.datasets) == (10, ("x", "y"))
    assert choice.value == pytest.approx((50 + 270) / 400)
    low, high = choice.interval
    assert (low, high) == pytest.approx(wilson(320, 400), abs=0.01)
    assert select_best(evaluated, {"big": {"n": 1}}, dataset="big").best.step == 20
    assert select_best(evaluated, settings, dataset="z").best.step == 10


# files


def test_evaluation_file_round_trips(tmp_path: Path) -> None:
    metrics = DatasetResult(
        summarize(SAMPLED, 1.0), rate_intervals(SAMPLED), 2, {"temperature": 0.8}, "bwrap", {"judge_s": 1.5}
    )
    model = checkpoint(tmp_path, 30, heart=metrics, other=result(0.5))
    path = write_evaluation(tmp_path / "eval" / "eval_step_30", model)
    assert read_evaluation(path.parent) == model
    content = json.loads(path.read_text())
    assert content["datasets"]["heart"]["accepted_at_1"] == 0.5
    assert content["datasets"]["heart"]["intervals"]["accepted_at_1"] == list(metrics.intervals["accepted_at_1"])
    assert (content["isolation"]["heart"], content["protocol"]["heart"]) == ("bwrap", {"temperature": 0.8})
    summary = json.loads((path.parent / "summary.json").read_text())
    assert (summary["step"], summary["tier"]) == (30, 2)
    assert {"num_problems", "accepted_at_1", "pass_at_4", "intervals"} <= summary["datasets"]["heart"].keys()


def test_non_finite_metrics_leave_old_file_unchanged(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, 1, x=result(0.5))
    path = write_evaluation(tmp_path, model)
    before = path.read_text()
    with pytest.raises(ValueError):
        write_evaluation(tmp_path, EvaluatedModel("n", 1, tmp_path, "", "w", {"x": result(0.5, cost=math.inf)}))
    assert path.read_text() == before


def test_unusable_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "metrics.json").write_text('{"label": "x"}')
    (tmp_path / "best_checkpoint.json").write_text("{}")
    (tmp_path / "verdicts").mkdir()
    (tmp_path / "verdicts" / "x.jsonl").write_text('{"problem_id": "a", "sample": 0, "error_type": "fine"}\n')
    with pytest.raises(UserError, match="cannot write .* use another output directory"):
        write_evaluation(tmp_path / "file", EvaluatedModel("x", 1, tmp_path, "", "w", {}))
    for read in (read_evaluation, read_best_checkpoint, read_outcomes):
        with pytest.raises(UserError, match="cannot read"):
            read(tmp_path)


def test_verdicts_are_read_in_sample_order(tmp_path: Path) -> None:
    path = write_verdicts(tmp_path, "heart", reversed(SAMPLED))
    found = read_outcomes(tmp_path)["heart"]
    assert found["a"] == ("success",) * 3 + ("wrong_answer",) and found["b"] == ("success",) + ("timeout",) * 3
    keys = "problem_id sample error_type pass_ratio num_passed num_tests judge_time gen_tokens truncated"
    assert list(json.loads(path.read_text().splitlines()[0])) == keys.split()


# the question-and-answer log


def many() -> list[JudgedAnswer]:
    kinds = np.random.default_rng(0).choice(ERROR_TYPES, size=200, p=(0.5, 0.3, 0.1, 0.07, 0.02, 0.01))
    return [judged(f"p{number}", kind) for number, kind in enumerate(kinds)]


def test_answer_sample_covers_error_types_and_is_deterministic() -> None:
    answers = many()
    drawn = sample_answers(answers, per_error_type=5)
    for kind in ERROR_TYPES:
        total = sum(one.verdict.error_type == kind for one in answers)
        assert sum(one.verdict.error_type == kind for one in drawn) == min(total, 5)
    ids = [one.problem.problem_id for one in drawn]
    assert ids == [one.problem.problem_id for one in sample_answers(many(), 5)]
    assert set(ids) == {one.problem.problem_id for one in sample_answers(answers[::-1], 5)}
    assert ids[:5] != [one.problem.problem_id for one in answers if one.verdict.error_type == "success"][:5]


def test_qa_log_stores_any_text(tmp_path: Path) -> None:
    path = write_qa_log(tmp_path / "new", "heart", FOUR)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert path == tmp_path / "new" / "qa_logs" / "heart_qa.jsonl"
    assert [row["error_type"] for row in rows] == ["success", "wrong_answer", "timeout", "api_error"]
    assert rows[0] == qa_row(FOUR[0]) and rows[0]["prompt"] == SURROGATE and rows[0]["program"] == "text"
    assert os.listdir(path.parent) == [path.name]


OTHERS = {
    "metrics": (
        ["step", "datasets.x.num_problems", "datasets.x.intervals", "seconds", "tier.x"],
        {"step": "10", "weights": None, "datasets": ["x"], "datasets.x.accepted_at_1": "0.5", "protocol.x": [],
         "datasets.x.num_problems": 0, "datasets.x.intervals": 1, "seconds.x": {"judge_s": "1"}, "isolation.x": None},
    ),
    "best_checkpoint": (
        ["step", "metric", "settings", "datasets"],
        {"step": "10", "mode": "most", "metric": 3, "datasets": [], "datasets ": [["x"]], "settings": [],
         "settings.x": 1},
    ),
}  # fmt: skip


def changed(content: dict[str, Any], key: str, *value: Any) -> dict[str, Any]:
    """A copy with another value at a dotted key, or without the key if no value is given."""
    head, _, rest = key.strip().partition(".")
    if rest:
        return {**content, head: changed(content[head], rest, *value)}
    return {**{name: item for name, item in content.items() if name != head}, **({head: value[0]} if value else {})}


@pytest.mark.parametrize("name", OTHERS)
def test_files_of_another_version_are_rejected(name: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path, 10, x=result(0.5))
    write_evaluation(tmp_path, model)
    write_best_checkpoint(tmp_path, select_best([model], X), [model])
    path, read = tmp_path / f"{name}.json", read_evaluation if name == "metrics" else read_best_checkpoint
    content = json.loads(path.read_text())
    missing, others = OTHERS[name]
    gone = [changed(content, key) for key in missing]
    for each in [*gone, *(changed(content, key, value) for key, value in others.items()), [], 7, None]:
        path.write_text(json.dumps(each))
        with pytest.raises(UserError, match="cannot read"):
            read(tmp_path)
    path.write_text(json.dumps({**content, "newer": 1}))
    read(tmp_path)
