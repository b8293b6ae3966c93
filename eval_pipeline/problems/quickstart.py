"""The quickstart's own format: `problem_id`, `prompt`, `entry_point`, `tests` and, if wanted, `family` and
`canonical_solution`."""

from __future__ import annotations

import ast

from eval_pipeline.judge import FunctionTests
from eval_pipeline.problems.problem import Problem
from eval_pipeline.problems.python_source import PARSE_ERRORS, parse
from eval_pipeline.problems.record import Record


def parse_problem(record: Record) -> Problem:
    """The problem of one row; `UserError` names what is wrong with it."""
    return Problem(
        problem_id=record.text("problem_id"),
        prompt=record.text("prompt"),
        tests=FunctionTests(entry_point=entry_point(record), tests=_tests(record)),
        family=record.optional_text("family"),
        canonical_solution=record.optional_text("canonical_solution"),
    )


def entry_point(record: Record) -> str:
    """The row's `entry_point`, a bare name; `UserError` otherwise."""
    name = record.text("entry_point")
    if not name.isidentifier():
        raise record.error(f"'entry_point' is {name!r}; it must be the bare name of a function or class")
    return name


def check_assertion(test: str, key: str, record: Record) -> None:
    """Refuse a test that cannot run or asserts nothing: it would count against the model, or for it."""
    try:
        tree = parse(test)
    except PARSE_ERRORS as error:
        raise record.error(f"{key} is not Python ({error}); correct the assert statement") from error
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise record.error(f"{key} asserts nothing; write an assert statement")


def _tests(record: Record) -> tuple[str, ...]:
    tests = record.fields.get("tests")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise record.error("'tests' must be a list of at least one Python assert statement")
    for index, test in enumerate(record.texts("tests")):
        check_assertion(test, f"tests[{index}]", record)
    return tuple(tests)
