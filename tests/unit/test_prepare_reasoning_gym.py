"""`prepare reasoning_gym`: problems of its datasets, and its scorers as judges."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from eval_pipeline.engines import GenerateRequest
from eval_pipeline.judge import JudgeClient, ScoredAnswer, Submission
from eval_pipeline.judge.scorers import RUNS_ANSWERS, final_answer, score
from eval_pipeline.problems.datasets import load_problems, problems_digest
from eval_pipeline.problems.problem import DatasetSource, Problem
from eval_pipeline.problems.verl_rl import ground_truth_of, read_tests
from verl_ext.data.prepare import is_prepared, prepare
from verl_ext.errors import UserError

NEEDLES = ["--task", "needle_haystack", "--set", "min_num_statements=3", "max_num_statements=5"]


@pytest.fixture(scope="module")
def needles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("needles")
    words = ["reasoning_gym", *NEEDLES, "--train", "40", "--val", "20", "--shots", "2", "--output", str(output)]
    prepare(words)
    assert is_prepared(words)
    return output


def test_prompts_have_examples_and_splits_are_disjoint(needles: Path) -> None:
    train, val = (pd.read_parquet(needles / f"{split}.parquet") for split in ("train", "val"))
    assert (len(train), len(val)) == (40, 20)
    for row in (train.iloc[0], val.iloc[0]):
        assert [turn["role"] for turn in row["prompt"]] == ["user", "assistant", "user", "assistant", "user"]
        assert row["data_source"] == "reasoning_gym/needle_haystack"
    questions = [{row["prompt"][-1]["content"] for _, row in table.iterrows()} for table in (train, val)]
    assert len(questions[0]) == 40 and not questions[0] & questions[1]
    assert all(3 <= question.count(". ") <= 5 for question in questions[0])


def test_few_distinct_questions_give_fewer_rows(tmp_path: Path) -> None:
    prepare(["reasoning_gym", "--task", "coin_flip", "--set", "min_trials=3", "max_trials=3", "--train", "0"]
            + ["--val", "1000", "--shots", "0", "--output", str(tmp_path)])  # fmt: skip
    assert 0 < len(pd.read_parquet(tmp_path / "val.parquet")) < 1_000
    assert not (tmp_path / "train.parquet").exists()


def test_evaluation_sends_all_turns_and_scorer_judges(needles: Path) -> None:
    problems = load_problems(DatasetSource("needles", "verl", str(needles / "val.parquet")))
    problem = problems[0]
    request = GenerateRequest(problem.problem_id, problem.prompt, 0, problem.earlier)
    assert [turn["role"] for turn in request.messages] == ["user", "assistant", "user", "assistant", "user"]
    assert request.messages[-1]["content"] == problem.prompt
    assert isinstance(problem.tests, ScoredAnswer) and read_tests(ground_truth_of(problem.tests), "p") == problem.tests
    right = json.loads(problem.tests.entry)["answer"]
    with JudgeClient() as judge:
        answers = (right, f"  {right.upper()}\nbecause the text says so", f"So <answer>{right}</answer>.", "Nobody", "")
        verdicts = [judge.submit(Submission(text, problem.tests)).result() for text in answers]
    assert [verdict.error_type for verdict in verdicts] == ["success"] * 3 + ["wrong_answer"] * 2
    assert verdicts[3].message == "the scorer of needle_haystack gives it 0"


def test_earlier_turns_change_problem_digest() -> None:
    tests = ScoredAnswer("gcd", '{"answer": "1"}')
    plain, after = Problem("p", "Go.", tests), Problem("p", "Go.", tests, earlier=(("system", "Be brief."),))
    assert problems_digest([plain]) != problems_digest([after])


def test_scores_as_many_lines_as_reference_has() -> None:
    assert final_answer("\n Ann \nSam", "Bob") == "Ann"
    assert final_answer("1 2\n3 4\n5 6", "9 9\n9 9") == "1 2\n3 4"
    assert final_answer("no <answer>Ann</answer> but <answer>\nBob\n</answer>", "Bob") == "Bob"
    assert final_answer("<think>\n<answer>Ann</answer>?\n</think>\n\nBob", "Ann") == "Bob"
    assert final_answer("<think>So <answer>Ann</answer></think>\n", "Ann") == "Ann"


def test_failing_scorer_gives_no_full_score() -> None:
    entry = json.dumps({"question": "q", "answer": "A B", "metadata": {}})
    assert score("x" * 1000, "syllogism", entry) < 1
    assert score("?", "rotate_matrix", entry) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--task", "needle"], "has no dataset 'needle'; use one of ab, "),
        (["--task", "countdown"], "executes answers or entries as Python code"),
        (["--task", "gcd", "--set", "min_numbers"], "--set has 'min_numbers'; write KEY=VALUE"),
        (["--task", "gcd", "--set", "numbers=3"], "cannot create gcd with these settings .*numbers.*correct --set"),
        (["--task", "gcd", "--set", "min_numbers=9", "max_numbers=3"], "cannot create gcd with these settings"),
    ],
)
def test_rejects_bad_input(words: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        prepare(["reasoning_gym", *words, "--output", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_evaluation_rejects_scorer_that_would_run_answers(tmp_path: Path) -> None:
    truth = json.dumps({"reasoning_gym": "countdown", "entry": {"question": "q", "answer": "1", "metadata": {}}})
    row = {"prompt": "q", "reward_model": {"ground_truth": truth}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match="rows.jsonl, line 1: .*countdown executes answers or entries as Python code"):
        load_problems(DatasetSource("mine", "verl", str(tmp_path / "rows.jsonl")))


def test_scorers_that_run_answers_or_entries_are_listed() -> None:
    import inspect

    import reasoning_gym

    calls = re.compile(r"(?<!literal_)(?<!def )\b(eval|exec|parse_expr)\(")
    only_generate = {"basic_arithmetic", "gsm_symbolic", "propositional_logic"}  # the last has a parser of its own
    found = {
        name
        for name, (dataset, _) in reasoning_gym.factory.DATASETS.items()
        if calls.search(inspect.getsource(inspect.getmodule(dataset)))
    }
    assert found - only_generate <= RUNS_ANSWERS and {"countdown", "number_sorting"} <= found
