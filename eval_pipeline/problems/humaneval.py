"""HumanEval's format: `task_id`, `prompt`, `entry_point`, `test`, `canonical_solution` (Chen et al. 2021,
arXiv 2107.03374). `openai/openai_humaneval` and HumanEval+ (`evalplus/humanevalplus`) use the same keys; the tests of
the latter import NumPy."""

from __future__ import annotations

from eval_pipeline.judge import FunctionTests
from eval_pipeline.problems.problem import Problem
from eval_pipeline.problems.python_source import PARSE_ERRORS, find_definition, first_line, parse
from eval_pipeline.problems.quickstart import entry_point
from eval_pipeline.problems.record import Record

INSTRUCTION = """Here is the beginning of a Python program:

```python
{code}
```

Implement `{entry_point}` as its docstring describes. Reply with the whole program, the beginning included, in one \
```python code block."""


def parse_problem(record: Record) -> Problem:
    """The problem of one row; its one test is the row's whole `test` followed by the call of `check`.

    Raises:
        UserError: a key is missing or of the wrong type, or its code does not parse or lacks the function.
    """
    name, prompt = entry_point(record), record.text("prompt")
    code_prompt = prompt if prompt.endswith("\n") else prompt + "\n"
    test = f"{record.text('test').rstrip()}\n\ncheck({name})\n"
    _check_test(test, record)
    solution = record.optional_text("canonical_solution")
    return Problem(
        problem_id=record.text("task_id", "problem_id"),
        prompt=INSTRUCTION.format(code=prompt.strip("\n"), entry_point=name),
        tests=FunctionTests(
            entry_point=name, tests=(test,), preamble=_preamble(code_prompt, name, record), code_prompt=code_prompt
        ),
        canonical_solution=None if solution is None else code_prompt + solution,
    )


def _preamble(code_prompt: str, name: str, record: Record) -> str:
    """What comes before the function's head: imports, and helper functions that both solution and test may call."""
    try:
        # the head may have no docstring, and so no body yet
        definition = find_definition(parse(f"{code_prompt}    ...\n"), name)
    except PARSE_ERRORS as error:
        raise record.error(f"'prompt' is not the beginning of a Python program ({error}); correct it") from error
    if definition is None:
        raise record.error(f"'prompt' does not end with the head of {name!r}; correct 'prompt' or 'entry_point'")
    lines = code_prompt.split("\n")[: first_line(definition) - 1]
    return "\n".join(lines).strip("\n") + "\n" if any(line.strip() for line in lines) else ""


def _check_test(test: str, record: Record) -> None:
    try:
        tree = parse(test)
    except PARSE_ERRORS as error:
        raise record.error(f"'test' is not Python ({error}); correct it") from error
    if find_definition(tree, "check") is None:
        raise record.error("'test' defines no function `check`; write one that takes the function to test")
