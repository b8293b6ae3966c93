"""Finds the program in a model's answer."""

from __future__ import annotations

import ast
import re
import textwrap

from eval_pipeline.problems.answer_text import clean_text, code_before, code_blocks
from eval_pipeline.problems.fences import PYTHON_TAGS
from eval_pipeline.problems.problem import FunctionTests, Problem, ReferenceAnswer
from eval_pipeline.problems.python_effects import gives_a_value, is_blank
from eval_pipeline.problems.python_source import find_definition, looks_defined, parse_or_none, parsing_beginning
from eval_pipeline.problems.whole_program import whole_program

_DEFINITION_START = re.compile(
    r"(?:async[ \t]+def|def|class)[ \t]+\w|import[ \t]+\w|from[ \t]+[\w.]+[ \t]+import\b|@\w"
)


def extract_program(problem: Problem, answer: str) -> str:
    """What is handed to the judge for an answer.

    Function tests: the last fenced Python block that defines the entry point (one without a language tag counts), else
    the last fenced block, else the text itself; a text that is not a program by its prose gives the definitions
    between. What then lacks the entry point but continues the problem's code is put behind that code. Programs: see
    `whole_program`. A reference answer: the text.

    Args:
        problem: the problem that was asked.
        answer: the model's whole text, prose and Markdown included; it may be cut off anywhere.

    Returns:
        The empty string where there is no program: nothing, or nothing but comments, constants and `pass`. Such an
        answer would run without an error, and must not count as code that ran.
    """
    if isinstance(problem.tests, ReferenceAnswer):
        return answer
    text = clean_text(answer)
    tests = problem.tests
    program = _function_program(text, tests) if isinstance(tests, FunctionTests) else whole_program(text)
    return "" if is_blank(program) else program


def _function_program(text: str, tests: FunctionTests) -> str:
    blocks = code_blocks(text)
    for block in reversed(blocks):
        if block.tag in ("", *PYTHON_TAGS) and looks_defined(block.source, tests.entry_point):
            return block.source
    if not blocks:
        return _unfenced_program(text, tests)
    if (code := code_before(blocks, text)) is not None:
        program = _unfenced_program(code, tests)
        if looks_defined(program, tests.entry_point):
            return program
    return _continued(blocks[-1].body, tests) or blocks[-1].source


def _unfenced_program(text: str, tests: FunctionTests) -> str:
    if not looks_defined(text, tests.entry_point):
        return _continued(text, tests) or text
    if parse_or_none(text) is not None:
        return text
    lines = text.split("\n")
    starts = [index for index, line in enumerate(lines) if _DEFINITION_START.match(line)]
    wanted = [index for index in starts if looks_defined(lines[index], tests.entry_point)]
    for start in [*starts[:1], *wanted[-1:]]:
        program = parsing_beginning(lines[start:])
        if looks_defined(program, tests.entry_point):
            return program
    return text


def _continued(text: str, tests: FunctionTests) -> str | None:
    """The problem's code with `text` behind it, where that is a program whose entry point has grown by it."""
    if not tests.code_prompt:
        return None
    body = text.strip("\n")
    program = parsing_beginning(f"{tests.code_prompt}{body}".split("\n"))
    if len(_body(program, tests)) > len(_body(tests.code_prompt, tests)):
        return program
    # the indentation of the first line may be lost in the tokenizer, or all of it; a `return` tells code from output
    for indented in ("    " + body.lstrip(), textwrap.indent(textwrap.dedent(body), "    ")):
        program = parsing_beginning(f"{tests.code_prompt}{indented}".split("\n"))
        if gives_a_value(_body(program, tests)):
            return program
    return None


def _body(program: str, tests: FunctionTests) -> list[ast.stmt]:
    """Statements of the entry point, its docstring included; none where it is not there or nothing parses."""
    tree = parse_or_none(program)
    definition = None if tree is None else find_definition(tree, tests.entry_point)
    return definition.body if definition else []
