"""A family with its parameters becomes a training sample or a held-out problem with tests."""

from __future__ import annotations

import json
from typing import Any

from verl_ext.data.prepare.files import Row
from verl_ext.data.prepare.quickstart.family import Family, Parameters


def problem_id(family: Family, parameters: Parameters) -> str:
    """Name one problem: the same family and parameters always give the same id, and others another."""
    return "/".join(["quickstart", family.name, *map(str, parameters.values())])


def to_sample(family: Family, parameters: Parameters, answer: str) -> Row:
    """Make a training row.

    Args:
        family: the kind of function.
        parameters: what was drawn for it.
        answer: the code that the assistant gives.
    """
    messages = [
        {"role": "user", "content": family.prompt(parameters)},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages, "family": family.name, "problem_id": problem_id(family, parameters)}


def to_problem(family: Family, parameters: Parameters) -> Row:
    """Make a held-out problem; its tests compare with the values that the right solution gives."""
    solution = family.solution(parameters)
    return {
        "problem_id": problem_id(family, parameters),
        "family": family.name,
        "prompt": family.prompt(parameters),
        "entry_point": family.function_name(parameters),
        "tests": _assertions(solution, family.expressions(parameters)),
        "canonical_solution": solution,
    }


def to_prompt(family: Family, parameters: Parameters) -> Row:
    """Make a row of verl's RL format; its ground truth is the tests, as the reward `code_tests` reads them."""
    problem = to_problem(family, parameters)
    tests = {"entry_point": problem["entry_point"], "tests": problem["tests"]}
    return {
        "data_source": "quickstart",
        "prompt": [{"role": "user", "content": problem["prompt"]}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(tests)},
        "extra_info": {"problem_id": problem["problem_id"], "family": family.name},
    }


def _assertions(solution: str, expressions: list[str]) -> list[str]:
    namespace: dict[str, Any] = {}
    exec(solution, namespace)
    return [f"assert {expression} == {eval(expression, namespace)!r}" for expression in expressions]
