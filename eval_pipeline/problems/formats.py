"""Formats of published data sets whose tests are functions or numbers: the quickstart, HumanEval, MBPP, GSM8K.

A `parse_` function returns the problem of one row. It raises a `UserError` if a key is missing or has the wrong type,
or if code does not parse.
"""

from __future__ import annotations

import ast

from eval_pipeline.judge import FunctionTests, ReferenceAnswer
from eval_pipeline.judge.numeric_answer import parse_number
from eval_pipeline.problems.problem import Problem
from eval_pipeline.problems.python_source import (
    PARSE_ERRORS,
    called_names,
    defined_names,
    find_definition,
    first_line,
    parse,
    runs_alone,
)
from eval_pipeline.problems.record import Record

# The quickstart: `problem_id`, `prompt`, `entry_point`, `tests`, and optionally `family` and `canonical_solution`


def parse_quickstart(record: Record) -> Problem:
    """The problem of one row."""
    return Problem(
        problem_id=record.text("problem_id"),
        prompt=record.text("prompt"),
        tests=FunctionTests(entry_point=_entry_point(record), tests=_quickstart_tests(record)),
        family=record.optional_text("family"),
        canonical_solution=record.optional_text("canonical_solution"),
    )


def _entry_point(record: Record) -> str:
    """The `entry_point` of the row, which must be a bare name."""
    name = record.text("entry_point")
    if not name.isidentifier():
        raise record.error(f"'entry_point' is {name!r}; it must be the bare name of a function or class")
    return name


def _check_assertion(test: str, key: str, record: Record) -> None:
    """Refuse a test that cannot run or asserts nothing: it would count against the model, or for it."""
    try:
        tree = parse(test)
    except PARSE_ERRORS as error:
        raise record.error(f"{key} is not Python ({error}); correct the assert statement") from error
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise record.error(f"{key} asserts nothing; write an assert statement")


def _quickstart_tests(record: Record) -> tuple[str, ...]:
    tests = record.fields.get("tests")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise record.error("'tests' must be a list of at least one Python assert statement")
    for index, test in enumerate(record.texts("tests")):
        _check_assertion(test, f"tests[{index}]", record)
    return tuple(tests)


# HumanEval (Chen et al. 2021, arXiv 2107.03374): `task_id`, `prompt`, `entry_point`, `test`, `canonical_solution`.
# `openai/openai_humaneval` and HumanEval+ (`evalplus/humanevalplus`) use the same keys; the tests of the latter import
# NumPy.

_HUMANEVAL_INSTRUCTION = """Here is the beginning of a Python program:

```python
{code}
```

Implement `{entry_point}` as its docstring describes. Reply with the whole program, the beginning included, in one \
```python code block."""


def parse_humaneval(record: Record) -> Problem:
    """The problem of one row; its only test is the whole `test` of the row followed by the call of `check`."""
    name, prompt = _entry_point(record), record.text("prompt")
    code_prompt = prompt if prompt.endswith("\n") else prompt + "\n"
    test = f"{record.text('test').rstrip()}\n\ncheck({name})\n"
    _check_humaneval_test(test, record)
    solution = record.optional_text("canonical_solution")
    return Problem(
        problem_id=record.text("task_id", "problem_id"),
        prompt=_HUMANEVAL_INSTRUCTION.format(code=prompt.strip("\n"), entry_point=name),
        tests=FunctionTests(
            entry_point=name,
            tests=(test,),
            preamble=_humaneval_preamble(code_prompt, name, record),
            code_prompt=code_prompt,
        ),
        canonical_solution=None if solution is None else code_prompt + solution,
    )


def _humaneval_preamble(code_prompt: str, name: str, record: Record) -> str:
    """The code before the function: imports, and helpers that both solution and test may call."""
    try:
        # without a docstring, the head has no body yet
        definition = find_definition(parse(f"{code_prompt}    ...\n"), name)
    except PARSE_ERRORS as error:
        raise record.error(f"'prompt' is not the beginning of a Python program ({error}); correct it") from error
    if definition is None:
        raise record.error(f"'prompt' does not end with the head of {name!r}; correct 'prompt' or 'entry_point'")
    lines = code_prompt.split("\n")[: first_line(definition) - 1]
    return "\n".join(lines).strip("\n") + "\n" if any(line.strip() for line in lines) else ""


def _check_humaneval_test(test: str, record: Record) -> None:
    try:
        tree = parse(test)
    except PARSE_ERRORS as error:
        raise record.error(f"'test' is not Python ({error}); correct it") from error
    if find_definition(tree, "check") is None:
        raise record.error("'test' defines no function `check`; write one that takes the function to test")


# MBPP, both published variants (Austin et al. 2021, arXiv 2108.07732). Full: `task_id`, `text`, `code`, `test_list`,
# `test_setup_code`. Sanitized: `task_id`, `prompt`, `code`, `test_list`, `test_imports`. Each assert of `test_list` is
# one test. As in the paper's protocol, `challenge_test_list` is not used.

_MBPP_INSTRUCTION = """{task}

Write a Python program for this task. These checks have to pass with it:

```python
{checks}
```

Reply with the whole program in one ```python code block, without the checks."""


def parse_mbpp(record: Record) -> Problem:
    """The problem of one row. Its prompt shows the tests, which alone tell the name of the function.

    Setup code that needs a definition of the answer, such as a class whose objects the asserts pass in, cannot be a
    preamble; it becomes the beginning of each test.
    """
    code, asserts, setup = record.text("code"), _asserts(record), _setup(record)
    alone = runs_alone(_parsed(setup, "the setup code", record))
    shown = asserts if alone else [setup.strip("\n"), *asserts]
    return Problem(
        problem_id=f"mbpp/{record.identifier('task_id')}",
        prompt=_MBPP_INSTRUCTION.format(task=record.text("text", "prompt").strip(), checks="\n".join(shown)),
        tests=FunctionTests(
            entry_point=_mbpp_entry_point(_parsed(code, "'code'", record), asserts, record),
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
        _check_assertion(test, f"test_list[{index}]", record)
    return tests


def _setup(record: Record) -> str:
    # setup code in the published file has Windows line ends
    parts = [*record.texts("test_imports"), record.optional_code("test_setup_code").replace("\r\n", "\n")]
    return "".join(f"{part.rstrip()}\n" for part in parts if part.strip())


def _parsed(source: str, what: str, record: Record) -> ast.Module:
    try:
        return parse(source)
    except PARSE_ERRORS as error:
        raise record.error(f"{what} is not Python ({error}); correct it") from error


def _mbpp_entry_point(code: ast.Module, asserts: list[str], record: Record) -> str:
    """The first function of the reference code that an assert calls; a class only if no function is called."""
    is_class = defined_names(code)
    called = [name for test in asserts for name in called_names(parse(test)) if name in is_class]
    if not called:
        raise record.error("no assert of 'test_list' calls a function that 'code' defines; correct one of them")
    return min(called, key=lambda name: is_class[name])


# GSM8K (Cobbe et al. 2021, arXiv 2110.14168): `question`, and `answer`, which ends with `#### 42`

_GSM8K_INSTRUCTION = """{question}

Solve this step by step. Then write the result as a number, without words, on a last line of its own that begins \
with ####."""


def parse_gsm8k(record: Record) -> Problem:
    """The problem of one row, which asks for the `#### 42` form of the data set.

    The judge also accepts `<answer>42</answer>` and `\\boxed{42}`, so models that were trained on those forms are not
    judged by the form. Rows without an `id` are named by their number in the file, the first `gsm8k/1`.
    """
    question, answer = record.text("question"), record.text("answer")
    _, mark, reference = answer.rpartition("####")
    if not mark or parse_number(reference) is None:
        raise record.error("'answer' must end with #### and a number")
    row_id = record.first("id", "task_id", "problem_id")
    return Problem(
        problem_id=f"gsm8k/{record.number}" if row_id is None else record.identifier("id", "task_id", "problem_id"),
        prompt=_GSM8K_INSTRUCTION.format(question=question.strip()),
        tests=ReferenceAnswer(reference.strip()),
        canonical_solution=answer,
    )
