"""The scorers of reasoning_gym (Stojanovski et al. 2025, arXiv 2505.24760), applied to a model's whole answer."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from functools import cache
from types import ModuleType
from typing import Any

from eval_pipeline.judge.numeric_answer import after_reasoning
from verl_ext.errors import UserError

PACKAGE = "reasoning-gym"
RUNS_ANSWERS = frozenset(
    {
        "binary_matrix", "bitwise_arithmetic", "codeio", "countdown", "intermediate_integration", "n_queens",
        "number_sorting", "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix",
        "string_insertion",
    }
)  # fmt: skip
"""Datasets whose scorer evaluates the answer or the entry as Python, directly or with sympy. Neither may run here."""
NEEDS = {"zebra_puzzles": "pycosat"}
"""A package without wheels that one dataset needs, but that reasoning_gym imports for all of them."""
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@cache
def require_scorer(task: str) -> None:
    """Refuse a dataset that reasoning_gym does not have, or whose scorer would run what a model wrote.

    Raises:
        UserError: the reason, and what to do instead.
    """
    known = _gym().factory.DATASETS
    if task not in known:
        raise UserError(f"reasoning_gym has no dataset {task!r}; use one of {', '.join(sorted(known))}")
    if task in RUNS_ANSWERS:
        raise UserError(
            f"the scorer of {task} executes answers or entries as Python code outside the sandbox; use another task"
        )
    if task in NEEDS and not hasattr(sys.modules.get(NEEDS[task]), "__file__"):
        raise UserError(f"{task} needs the package {NEEDS[task]}; install it with `pip install {NEEDS[task]}`")


def score(answer: str, task: str, entry: str) -> float:
    """The scorer's number for an answer, 0 to 1; 0 if the scorer cannot read it.

    Args:
        answer: the model's whole text; see `final_answer`.
        task: name of the dataset.
        entry: the dataset's entry as JSON.

    Raises:
        UserError: see `require_scorer`.
    """
    require_scorer(task)
    fields = json.loads(entry)
    try:
        return float(_scorer(task)(final_answer(answer, str(fields["answer"])), fields))
    except Exception:  # scorers parse whatever a model writes, and many fail on unexpected text
        return 0.0


def final_answer(text: str, reference: str) -> str:
    """The scored part of a text: inside `<answer>`, or else as many lines as the reference has, from the top.

    Reasoning up to `</think>` counts only if nothing follows it.
    """
    final = after_reasoning(text)
    text = final if final is not None and final.strip() else text
    tagged = _TAGGED.findall(text)
    if tagged:
        return tagged[-1].strip()
    lines = text.strip().splitlines()
    return "\n".join(lines[: len(reference.strip().splitlines()) or 1]).strip()


@cache
def _scorer(task: str) -> Any:
    return _gym().get_score_answer_fn(task)


@cache
def _gym() -> Any:
    for package in NEEDS.values():
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            sys.modules[package] = ModuleType(package)
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed; install it with `pip install {PACKAGE}`") from error
    return reasoning_gym
