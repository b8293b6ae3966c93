"""MBPP's format, both published variants (Austin et al. 2021, arXiv 2108.07732).

Full: `task_id`, `text`, `code`, `test_list`, `test_setup_code`. Sanitized: `task_id`, `prompt`, `code`, `test_list`,
`test_imports`. Each assert of `test_list` is one test. `challenge_test_list` is not used, as in the paper's protocol.
"""

from __future__ import annotations

import ast

from eval_pipeline.judge import FunctionTests
from eval_pipeline.problems.problem import Problem
from eval_pipeline.problems.python_source import PARSE_ERRORS, called_names, defined_names, parse, runs_alone
from eval_pipeline.problems.quickstart import check_assertion
from eval_pipeline.problems.record import Record

INSTRUCTION = """{task}

Write a Python program for this task. These checks have to pass with it:

```python
{checks}
```

Reply with the whole program in one ```python code block, without the checks."""


def parse_problem(record: Record) -> Problem:
    """The problem of one row. Its prompt shows the tests, without which the function's name could not be known.

    Setup code that needs something of the answer, such as a class whose objects the asserts pass in, cannot be a
    preamble: it becomes the beginning of each test.

    Raises:
        UserError: a key is missing or of the wrong type, code does not parse, or no assert calls what `code` defines.
    """
    code, asserts, setup = record.text("code"), _asserts(record), _setup(record)
    alone = runs_alone(_parsed(setup, "the setup code", record))
    shown = asserts if alone else [setup.strip("\n"), *asserts]
    return Problem(
        problem_id=f"mbpp/{record.identifier('task_id')}",
        prompt=INSTRUCTION.format(task=record.text("text", "prompt").strip(), checks="\n".join(shown)),
        tests=FunctionTests(
            entry_point=_entry_point(_parsed(code, "'code'", record), asserts, record),
            tests=tuple(asserts if alone else [f"{setup}{test}" for test in asserts]),
            preamble=setup if alone else "",
        ),
        canonical_solution=code,
    )


def _asserts(record: Record) -> list[str]:
    tests = record.texts("test_list")
    if not tests:
        raise record.error("'test_list' must be a list of at least one Python assert statement")
    for index, test in enumerate(tests):
        check_assertion(test, f"test_list[{index}]", record)
    return tests


def _setup(record: Record) -> str:
    # setup code of the published file has Windows line ends
    parts = [*record.texts("test_imports"), record.optional_code("test_setup_code").replace("\r\n", "\n")]
    return "".join(f"{part.rstrip()}\n" for part in parts if part.strip())


def _parsed(source: str, what: str, record: Record) -> ast.Module:
    try:
        return parse(source)
    except PARSE_ERRORS as error:
        raise record.error(f"{what} is not Python ({error}); correct it") from error


def _entry_point(code: ast.Module, asserts: list[str], record: Record) -> str:
    """The first function of the reference code that an assert calls; a class only where no function is called."""
    is_class = defined_names(code)
    called = [name for test in asserts for name in called_names(parse(test)) if name in is_class]
    if not called:
        raise record.error("no assert of 'test_list' calls a function that 'code' defines; correct one of them")
    return min(called, key=lambda name: is_class[name])
