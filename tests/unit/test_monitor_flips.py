"""Flipped problems: two evaluations of a run are compared answer by answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nicegui import Client, ui

from eval_pipeline.report.comparison import compare_models
from tests.helpers.evaluation import write_lines
from tests.helpers.monitor import look, write_record
from verl_ext.monitor.flips import AnswerKey, FlipsPanel, compare, read_answer, read_evaluations
from verl_ext.monitor.follower import RunFollower
from verl_ext.monitor.state import PageState

VERDICTS = {
    "base_model": {"one": "success", "two": "wrong_answer", "three": "success", "four": "timeout"},
    "step_20": {"one": "success", "two": "success", "three": "runtime_error", "four": "timeout"},
    "step_100": {"one": "success", "two": "success", "three": "success", "four": "wrong_answer"},
}
PROTOCOL = {"sampling": {"max_tokens": 384}, "problems_digest": "d"}


def write_evaluation(run_dir: Path, label: str, verdicts: dict[str, str], answers: str = "answers/few.jsonl") -> Path:
    """The files of an evaluation that the monitor reads; `answers` is the file of the answers."""
    directory = run_dir / "eval" / f"eval_{label}"
    step = int(label.removeprefix("step_")) if label.startswith("step_") else None
    rows = [
        {"problem_id": name, "sample": 0, "error_type": kind, "num_passed": int(kind == "success"), "num_tests": 2}
        for name, kind in verdicts.items()
    ]
    write_lines(directory / "verdicts/few.jsonl", rows)
    texts = {name: {"prompt": f"solve {name}", "answer": f"{label} says {name}"} for name in verdicts}
    message = "test 2: printed 5, expected 7"
    write_lines(directory / answers, [row | texts[row["problem_id"]] | {"message": message} for row in rows])
    metrics = {"label": label, "step": step, "datasets": {"few": {}}, "protocol": {"few": PROTOCOL}}
    (directory / "metrics.json").write_text(json.dumps(metrics))
    return directory


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose base model and two checkpoints were evaluated; the second one is the best."""
    run_dir = tmp_path / "checkpoints/p/e"
    write_record(run_dir)
    for label, verdicts in VERDICTS.items():
        write_evaluation(run_dir, label, verdicts)
    (run_dir / "best_checkpoint.json").write_text('{"step": 20}')
    (run_dir / "global_step_20").mkdir()
    return run_dir


@pytest.fixture
def follower(run_dir: Path, tmp_path: Path) -> Iterator[RunFollower]:
    made = RunFollower(tmp_path / "monitor.sqlite", tmp_path / "checkpoints")
    look(made)
    yield made
    made.stop()


def test_comparison_counts_flips_and_keeps_both_verdicts(run_dir: Path) -> None:
    evaluations = read_evaluations(run_dir)
    assert [each.label for each in evaluations] == ["base_model", "step_20", "step_100"]
    found = compare(evaluations[0], evaluations[1], "few")
    assert found.counts == {"Gained": 1, "Lost": 1, "Both": 1, "Neither": 1} and found.p_value == 1.0
    kinds = {str(key): [row["error_type"] for row in rows] for key, rows in found.flips.items()}
    assert kinds == {"three": ["success", "runtime_error"], "two": ["wrong_answer", "success"]}


@pytest.mark.parametrize("samples", [[0], [0, 1]])
def test_p_value_is_that_of_report(run_dir: Path, samples: list[int]) -> None:
    """With two answers of each problem, a test over answers would count each problem twice."""
    rng = np.random.default_rng(0)
    outcomes: list[dict[str, tuple[str, ...]]] = []
    for label, share in (("step_20", 0.3), ("step_100", 0.6)):
        kinds = {f"p{n}": ["timeout", "success"][rng.random() < share] for n in range(12)}
        outcomes.append({name: (kind,) * len(samples) for name, kind in kinds.items()})
        rows = [{"problem_id": name, "sample": n, "error_type": kind} for name, kind in kinds.items() for n in samples]
        write_lines(run_dir / "eval" / f"eval_{label}/verdicts/few.jsonl", rows)
    _, a, b = read_evaluations(run_dir)
    found, expected = compare(a, b, "few"), compare_models(*outcomes)["accepted_at_1"]
    assert (found.p_value, found.test) == (expected.p_value, expected.test) and 0 < found.p_value < 1
    assert sum(found.counts.values()) == 12 * len(samples)
    assert any(key.sample for key in found.flips) == (len(samples) == 2)


@pytest.mark.parametrize("answers", ["answers/few.jsonl", "qa_logs/few_qa.jsonl"])
def test_answers_of_older_evaluations_come_from_qa_log(tmp_path: Path, answers: str) -> None:
    write_evaluation(tmp_path, "step_1", {"one": "success"}, answers)
    [evaluation] = read_evaluations(tmp_path)
    found = read_answer(evaluation, "few", AnswerKey("one", 0))
    assert found is not None and found["answer"] == "step_1 says one"
    assert read_answer(evaluation, "few", AnswerKey("two", 0)) is None


@pytest.mark.parametrize("content", ["[]", '{"protocol": 1}', '{"protocol": {"../../x": {}}, "step": "1"}', "{"])
def test_malformed_metrics_offer_no_foreign_file(tmp_path: Path, content: str) -> None:
    directory = write_evaluation(tmp_path, "step_1", {"one": "success"})
    (directory / "metrics.json").write_text(content)
    assert {name for each in read_evaluations(tmp_path) for name in each.protocols} <= {"few"}


def shown(follower: RunFollower, state: PageState) -> dict[str, Any]:
    """What the panel shows: counts, names of table rows, and the texts of the answers."""
    texts: dict[str, Any] = {}

    def go(push: bool = True, **changes: Any) -> None:
        vars(state).update(changes)

    async def call() -> None:
        with Client(ui.page("")) as client:
            await FlipsPanel(follower, state, go).show()
            for each in client.elements.values():
                name = each.props.get("data-testid", "")
                texts[name] = [child.text for child in each.descendants() if isinstance(child, ui.label)]
                if isinstance(each, ui.table):
                    texts["rows"] = [(row["key"], row["A"], row["B"]) for row in each.rows]
                if isinstance(each, ui.select):
                    texts[name] = each.value

    asyncio.run(call())
    return texts


def test_panel_compares_base_model_with_best(follower: RunFollower) -> None:
    texts = shown(follower, PageState(run="p/e", problem="three"))
    assert (texts["flips dataset"], texts["flips a"], texts["flips b"]) == ("few", "base_model", "step_20")
    assert texts["rows"] == [("three", "success", "runtime_error"), ("two", "wrong_answer", "success")]
    assert "base_model says three" in texts["answer A"] and "step_20 says three" in texts["answer B"]
    assert "test 2: printed 5, expected 7" in texts["answer B"] and "solve three" in texts["flip"]
    texts = shown(follower, PageState.from_query("?run=p%2Fe&a=step_100&b=base_model&dataset=few&problem=gone"))
    assert texts["rows"] == [("two", "success", "wrong_answer")] and "answer A" not in texts


def test_panel_rejects_different_protocols(run_dir: Path, follower: RunFollower) -> None:
    path = run_dir / "eval/eval_step_20/metrics.json"
    path.write_text(path.read_text().replace("384", "512"))
    texts = shown(follower, PageState(run="p/e"))
    assert texts["rows"] == [] and texts["flips summary"] == [
        "Not compared, because the protocols of A and B differ: sampling.max_tokens: 384 / 512"
    ]
