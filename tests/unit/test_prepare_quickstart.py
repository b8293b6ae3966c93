"""The quickstart task: function families, held-out problems, tokenizer and model."""

from __future__ import annotations

import random
from typing import Any

import pytest

from verl_ext.data.prepare.quickstart import (
    QuickstartData,
    build_model,
    problem_id,
    sample_quickstart,
    to_problem,
    train_tokenizer,
)
from verl_ext.data.prepare.quickstart_families import BUGGY_FAMILIES, FAMILIES, FunctionFamily
from verl_ext.data.prepare.tables import Row

# What each family means, worked out by hand: parameters, an expression, its value.
BY_HAND = {
    "add": ({"k": 37}, "add_37(5)", 42),
    "subtract": ({"k": 37}, "sub_37(5)", -32),
    "subtract_from": ({"k": 37}, "from_37(5)", 32),
    "multiply": ({"k": 37}, "times_37(2)", 74),
    "remainder": ({"k": 37}, "mod_37(40)", 3),
    "divisible": ({"k": 37}, "[div_37(74), div_37(75)]", [True, False]),
    "at_least": ({"k": 37}, "[floor_37(1), floor_37(40)]", [37, 40]),
    "at_most": ({"k": 37}, "[cap_37(1), cap_37(40)]", [1, 37]),
    "linear": ({"a": 3, "b": 7}, "line_3_7(2)", 13),
    "choose": ({"a": 3, "b": 7}, "[pick_3_7(1), pick_3_7(0)]", [3, 7]),
    "reduce_above": ({"a": 3, "b": 7}, "[cut_3_7(7), cut_3_7(8)]", [7, 5]),
    "append": ({"k": 37}, "push_37([1])", [1, 37]),
    "prepend": ({"k": 37}, "front_37([1])", [37, 1]),
    "count": ({"k": 37}, "count_37([37, 1, 37])", 2),
    "contains": ({"k": 37}, "[has_37([37]), has_37([3])]", [True, False]),
    "remove": ({"k": 37}, "no_37([37, 1, 37])", [1]),
    "add_each": ({"k": 37}, "shift_37([1, 2])", [38, 39]),
    "sum_plus": ({"k": 37}, "total_37([1, 2])", 40),
    "suffix": ({"k": 37}, "tag_37('a')", "a37"),
    "replace": ({"a": 12, "b": 34}, "swap_12_34('x12')", "x34"),
    "over": ({"k": 37}, "[over_37(37), over_37(38)]", [False, True]),
    "between": ({"a": 3, "b": 7}, "[in_3_7(x) for x in (2, 3, 7, 8)]", [False, True, True, False]),
    "count_up": ({"k": 4}, "upto_4()", [1, 2, 3, 4]),
    "count_down": ({"k": 4}, "down_4()", [4, 3, 2, 1]),
    "sum_range": ({"k": 4}, "sum_4(6)", 15),
    "first_items": ({"k": 2}, "first_2([5, 6, 7])", [5, 6]),
    "skip_items": ({"k": 2}, "skip_2([5, 6, 7])", [7]),
    "item_number": ({"k": 2}, "item_2([5, 6, 7])", 6),
    "pages": ({"k": 10}, "[pages_10(n) for n in (0, 10, 11)]", [0, 1, 2]),
    "keep_large": ({"k": 37}, "keep_37([36, 37, 38])", [37, 38]),
}


@pytest.fixture(scope="module")
def dataset() -> QuickstartData:
    return sample_quickstart(1500, seed=3)


def num_failed(code: str, tests: list[str]) -> int:
    """Count the failed assertions; any other exception propagates to the test."""
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    failed = 0
    for test in tests:
        try:
            exec(test, namespace)
        except AssertionError:
            failed += 1
    return failed


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_solution_matches_hand_computed_value(family: FunctionFamily) -> None:
    parameters, expression, value = BY_HAND[family.name]
    namespace: dict[str, Any] = {}
    exec(family.solution(parameters), namespace)
    assert eval(expression, namespace) == value


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_tests_accept_solution_and_detect_mistake(family: FunctionFamily) -> None:
    generator = random.Random(0)
    for _ in range(40):
        parameters = family.sample(generator)
        problem = to_problem(family, parameters)
        assert 3 <= len(problem["tests"]) <= 6
        assert num_failed(problem["canonical_solution"], problem["tests"]) == 0
        buggy = family.buggy_solution(parameters)
        assert buggy is None or num_failed(buggy, problem["tests"]) > 0


@pytest.mark.parametrize("family", BUGGY_FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("bound", [2, 998, 999])
def test_mistake_is_detected_at_parameter_bounds(family: FunctionFamily, bound: int) -> None:
    parameters = {"a": 2, "b": 99} if "b" in family.sample(random.Random(0)) else {"k": bound}
    problem = to_problem(family, parameters)
    assert num_failed(family.buggy_solution(parameters) or "", problem["tests"]) > 0


def test_no_problem_is_in_two_splits(dataset: QuickstartData) -> None:
    held_ids = {problem_id(family, parameters) for family, parameters in dataset.held_out}
    held_prompts = {family.prompt(parameters) for family, parameters in dataset.held_out}
    assert len(held_ids) == len(held_prompts) == len(dataset.held_out) == 180
    train, val = ({row["problem_id"] for row in rows} for rows in (dataset.train, dataset.val))
    assert not held_ids & (train | val)
    assert not train & val
    assert not held_prompts & {row["messages"][0]["content"] for row in dataset.train + dataset.val}


def test_dataset_has_expected_sizes_and_share_of_mistakes(dataset: QuickstartData) -> None:
    assert (len(dataset.train), len(dataset.val)) == (1500, 30)
    buggy = {family.name for family in BUGGY_FAMILIES}
    answers = [row for row in dataset.train if row["family"] in buggy]
    assert len(answers) == 500
    assert 0.68 < sum(map(has_mistake, answers)) / len(answers) < 0.82
    assert not any(has_mistake(row) for row in dataset.train if row["family"] not in buggy)


def has_mistake(row: Row) -> bool:
    family = next(family for family in FAMILIES if family.name == row["family"])
    numbers = [int(word) for word in row["problem_id"].split("/")[2:]]
    parameters = dict(zip(("k",) if len(numbers) == 1 else ("a", "b"), numbers, strict=True))
    return row["messages"][1]["content"] != family.solution(parameters)


def test_same_seed_gives_same_data(dataset: QuickstartData) -> None:
    assert sample_quickstart(1500, seed=3).train == dataset.train
    assert sample_quickstart(1500, seed=4).train != dataset.train


def test_tokenizer_splits_digits_and_ends_turns(dataset: QuickstartData) -> None:
    tokenizer = train_tokenizer([row["messages"] for row in dataset.train])
    assert tokenizer.tokenize("add_8375") == [*tokenizer.tokenize("add_"), "8", "3", "7", "5"]
    text = "def f(x):\n    return x + 12  # ä"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(tokenizer) <= 1000


def test_model_matches_tokenizer_and_seed(dataset: QuickstartData) -> None:
    tokenizer = train_tokenizer([row["messages"] for row in dataset.train])
    first, again, other = (build_model(tokenizer, seed) for seed in (0, 0, 1))
    assert 1_500_000 < first.num_parameters() < 2_500_000
    assert first.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert first.lm_head.weight.data_ptr() != first.model.embed_tokens.weight.data_ptr()
    assert (first.lm_head.weight == again.lm_head.weight).all()
    assert not (first.lm_head.weight == other.lm_head.weight).all()
