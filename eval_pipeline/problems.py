"""The problems of an evaluation, one JSON object a line."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.errors import UserError


@dataclass(frozen=True)
class Problem:
    """One task for the model and the tests its answer has to pass."""

    problem_id: str
    prompt: str
    """The user's instruction, without any chat template."""
    entry_point: str
    """Name of the function or class that the tests call."""
    tests: tuple[str, ...]
    """Python source of one assertion each."""
    family: str | None = None
    canonical_solution: str | None = None


def load_problems(path: Path, limit: int | None = None) -> list[Problem]:
    """Read and check a problems file.

    Args:
        path: JSONL with `problem_id`, `prompt`, `entry_point`, `tests` and, if wanted, `family` and
            `canonical_solution`. Other keys are left alone, blank lines are skipped.
        limit: keep only this many problems from the top; None keeps all. The whole file is checked all the same.

    Raises:
        UserError: the file cannot be read, is empty, or a line is not a problem; the message names the line.
    """
    problems: dict[str, Problem] = {}
    for number, line in enumerate(_read_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        problem = _parse_problem(line, where)
        if problem.problem_id in problems:
            raise UserError(f"{where}: problem_id {problem.problem_id!r} occurs twice; give every problem its own.")
        problems[problem.problem_id] = problem
    if not problems:
        raise UserError(f"{path} holds no problems; write one JSON object a line.")
    return list(problems.values())[:limit]


def dataset_name(path: Path) -> str:
    """The name of a problems file's figures: its directory's, so `data/quickstart/problems.jsonl` is `quickstart`."""
    absolute = path.resolve()
    return absolute.parent.name or absolute.stem


def _read_lines(path: Path) -> list[str]:
    try:
        # not `splitlines`: JSON strings may hold U+2028 and its like, which are no line ends in JSONL
        return path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read the problems file {path} ({error}); name a UTF-8 JSONL file.") from error


def _parse_problem(line: str, where: str) -> Problem:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); write one object a line.") from error
    if not isinstance(record, dict):
        raise UserError(f"{where} is not a JSON object; write one object a line.")
    return Problem(
        problem_id=_text(record, "problem_id", where),
        prompt=_text(record, "prompt", where),
        entry_point=_entry_point(record, where),
        tests=_tests(record, where),
        family=_optional_text(record, "family", where),
        canonical_solution=_optional_text(record, "canonical_solution", where),
    )


def _text(record: dict[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {key!r} must be a string that is not empty.")
    return value


def _optional_text(record: dict[str, Any], key: str, where: str) -> str | None:
    return None if record.get(key) is None else _text(record, key, where)


def _entry_point(record: dict[str, Any], where: str) -> str:
    name = _text(record, "entry_point", where)
    if not name.isidentifier():
        raise UserError(f"{where}: 'entry_point' is {name!r}; it must be the bare name of a function or class.")
    return name


def _tests(record: dict[str, Any], where: str) -> tuple[str, ...]:
    tests = record.get("tests")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise UserError(f"{where}: 'tests' must be a list of at least one python assert statement.")
    for index, test in enumerate(tests):
        _check_test(test, f"{where}: tests[{index}]")
    return tuple(tests)


def _check_test(test: str, where: str) -> None:
    """A test that cannot run would count against the model, so it is refused here."""
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{where} is not python ({error}); mend the assert statement.") from error
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise UserError(f"{where} asserts nothing; write an assert statement.")
