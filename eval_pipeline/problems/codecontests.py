"""CodeContests' format (Li et al. 2022, arXiv 2203.07814), and plainer rows of the same kind.

`name`, `description`, and tests under `public_tests`, `private_tests`, `generated_tests` or `tests`, each
`{input: [...], output: [...]}` or a list of `{input, output}`; or `input` and `output` lists in the row itself.
All tests are used, and one input once. `time_limit` is not: every problem has the protocol's limits.
"""

from __future__ import annotations

from typing import Any

from eval_pipeline.judge import ProgramCase, ProgramTests
from eval_pipeline.problems.problem import Problem
from eval_pipeline.problems.record import Record
from eval_pipeline.problems.tolerance import stated_tolerance

TEST_KEYS = ("public_tests", "private_tests", "generated_tests", "tests")
PYTHON3 = (3, "PYTHON3")
"""How `solutions.language` says Python 3: its number in the published data, its name in exports."""
INSTRUCTION = """{description}

Write a Python 3 program that solves this problem. It reads the input from standard input and prints the output, and \
nothing else, to standard output. Reply with the whole program in one ```python code block."""


def parse_problem(record: Record) -> Problem:
    """The problem of one row.

    Raises:
        UserError: a key is missing or of the wrong type, there is no test, or inputs and outputs differ in number.
    """
    description = record.text("description", "prompt", "question")
    return Problem(
        problem_id=record.identifier("name", "problem_id", "task_id", "id"),
        prompt=INSTRUCTION.format(description=description.strip()),
        tests=ProgramTests(_cases(record), stated_tolerance(description)),
        canonical_solution=_canonical_solution(record),
    )


def _cases(record: Record) -> tuple[ProgramCase, ...]:
    cases: dict[str, ProgramCase] = {}
    for key in TEST_KEYS:
        for case in _cases_of(record.fields.get(key), key, record):
            cases.setdefault(case.stdin, case)
    plain = {"input": record.fields.get("input"), "output": record.fields.get("output")}
    if plain != {"input": None, "output": None}:
        for case in _cases_of(plain, "the row", record):
            cases.setdefault(case.stdin, case)
    if not cases:
        raise record.error(f"{', '.join(TEST_KEYS)}, 'input' and 'output' hold no test; add one")
    return tuple(cases.values())


def _cases_of(tests: Any, key: str, record: Record) -> list[ProgramCase]:
    """The cases of one group of tests, in either of the two ways to write it."""
    if tests is None:
        return []
    if isinstance(tests, dict):
        inputs, outputs = tests.get("input"), tests.get("output")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise record.error(f"'input' and 'output' of {key} must be two lists of the same length")
        pairs = list(zip(inputs, outputs))
    elif isinstance(tests, list) and all(isinstance(test, dict) for test in tests):
        pairs = [(test.get("input"), test.get("output")) for test in tests]
    else:
        raise record.error(f"{key!r} must be an object of 'input' and 'output' lists, or a list of such pairs")
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise record.error(f"every 'input' and 'output' of {key} must be a string")
    return [ProgramCase(stdin, expected) for stdin, expected in pairs]


def _canonical_solution(record: Record) -> str | None:
    """The first of the published solutions that is in Python 3."""
    solutions = record.fields.get("solutions")
    if solutions is None:
        return record.optional_text("canonical_solution")
    if not isinstance(solutions, dict) or not all(isinstance(solutions.get(k), list) for k in ("language", "solution")):
        raise record.error("'solutions' must be an object of 'language' and 'solution' lists")
    pairs = zip(solutions["language"], solutions["solution"])
    return next((solution for language, solution in pairs if language in PYTHON3), None)
