"""Problems whose tests are doctests: rows of `name`, `task` and `examples`, which are `>>>` lines and their results."""

from __future__ import annotations

import doctest

from eval_pipeline.problems import FunctionTests, Problem, Record

PROMPT = """{task}

These examples have to hold:

{examples}

Reply with the function in one ```python code block."""


def parse_problem(record: Record) -> Problem:
    """The problem of one row; each example becomes a separate test.

    Raises:
        UserError: a key is missing or blank, or the examples have no result to compare with.
    """
    name, examples = record.text("name"), record.text("examples")
    pairs = [(each.source.strip(), each.want.strip()) for each in doctest.DocTestParser().get_examples(examples)]
    if not pairs or not all(want for _, want in pairs):
        raise record.error("'examples' must be >>> lines, each followed by its result")
    return Problem(
        problem_id=name,
        prompt=PROMPT.format(task=record.text("task"), examples=examples.strip()),
        tests=FunctionTests(entry_point=name, tests=tuple(f"assert {source} == {want}" for source, want in pairs)),
        canonical_solution=record.optional_text("solution"),
    )
