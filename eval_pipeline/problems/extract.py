"""Finds the program in a model's answer."""

from __future__ import annotations

import ast
import textwrap

from eval_pipeline.judge import FunctionTests, ReferenceAnswer
from eval_pipeline.problems.answer_text import behind_reasoning, clean_text, code_before, code_blocks
from eval_pipeline.problems.fences import PYTHON_TAGS, one_line_blocks
from eval_pipeline.problems.problem import Problem
from eval_pipeline.problems.python_effects import acts, gives_a_value, is_blank
from eval_pipeline.problems.python_source import (
    SourceParser,
    defines,
    find_definition,
    looks_defined,
    parsing_beginning,
)
from eval_pipeline.problems.whole_program import MAX_STARTS, code_starts, whole_program

MAX_ANSWER_CHARS = 1 << 18
"""More than most models can write; the program is at the end."""


def extract_program(problem: Problem, answer: str) -> str:
    """What is handed to the judge for an answer.

    What follows a closed `<think>`, if it holds a program, else the whole text. Function tests: the last fenced Python
    block that defines the entry point (one without a language tag counts), else the last fenced block, else the text
    itself; a text that is not a program by its prose gives the definitions between. What then lacks the entry point
    but continues the problem's code is put behind that code. Programs: see `whole_program`. A reference answer: the
    text.

    It takes at most about a second: of a longer text the last `MAX_ANSWER_CHARS` are searched, and what is parsed on
    the way is limited too.

    Args:
        problem: the problem that was asked.
        answer: the model's whole text, prose and Markdown included; it may be cut off anywhere.

    Returns:
        The empty string where there is no program: nothing, or nothing but comments, constants and `pass`. Such an
        answer would run without an error, and must not count as code that ran.
    """
    if isinstance(problem.tests, ReferenceAnswer):
        return answer
    text, tests, parser = clean_text(_last_lines(answer)), problem.tests, SourceParser()
    final = behind_reasoning(text)
    if isinstance(tests, FunctionTests):
        program = "" if final is None else _function_program(final, tests, parser)
        if not defines(program, tests.entry_point, parser):
            program = _function_program(text, tests, parser)
    else:
        program = "" if final is None else whole_program(final, parser)
        if not _is_meant_to_run(program, final, parser):
            program = whole_program(text, parser)
    return "" if is_blank(program, parser) else program


def _last_lines(text: str) -> str:
    if len(text) <= MAX_ANSWER_CHARS:
        return text
    start = len(text) - MAX_ANSWER_CHARS
    return text[text.find("\n", start) + 1 or start :]


def _is_meant_to_run(program: str, final: str | None, parser: SourceParser) -> bool:
    """Whether a program from the final part of an answer does something, or is code that is broken."""
    if (tree := parser.tree(program)) is not None:
        return acts(tree)
    return final is not None and any(block.tag in PYTHON_TAGS for block in code_blocks(final))


def _function_program(text: str, tests: FunctionTests, parser: SourceParser) -> str:
    blocks = code_blocks(text)
    for block in reversed(blocks):
        if block.tag in ("", *PYTHON_TAGS) and defines(block.source, tests.entry_point, parser):
            return block.source
    program = _unfenced_program(text, tests, parser) if not blocks else ""
    if (code := code_before(blocks, text)) is not None:
        program = _unfenced_program(code, tests, parser)
    if defines(program, tests.entry_point, parser):
        return program
    for block in reversed(one_line_blocks(text)):
        if looks_defined(block.body, tests.entry_point):
            return block.body
    if not blocks:
        return program
    return _continued(blocks[-1].body, tests, parser) or blocks[-1].source


def _unfenced_program(text: str, tests: FunctionTests, parser: SourceParser) -> str:
    if parser.tree(text) is not None and defines(text, tests.entry_point, parser):
        return text
    lines = text.split("\n")
    wanted = [index for index, line in enumerate(lines) if looks_defined(line, tests.entry_point)]
    for start in [*code_starts(lines)[:MAX_STARTS], *wanted[-1:]]:
        program = parsing_beginning(lines[start:], parser)
        if defines(program, tests.entry_point, parser):
            return program
    return text if wanted else _continued(text, tests, parser) or text


def _continued(text: str, tests: FunctionTests, parser: SourceParser) -> str | None:
    """The problem's code with `text` behind it, where that is a program whose entry point has grown by it."""
    if not tests.code_prompt:
        return None
    body = text.strip("\n")
    program = parsing_beginning(f"{tests.code_prompt}{body}".split("\n"), parser)
    if len(_body(program, tests, parser)) > len(_body(tests.code_prompt, tests, parser)):
        return program
    # the indentation of the first line may be lost in the tokenizer, or all of it; a `return` tells code from output
    for indented in ("    " + body.lstrip(), textwrap.indent(textwrap.dedent(body), "    ")):
        program = parsing_beginning(f"{tests.code_prompt}{indented}".split("\n"), parser)
        if gives_a_value(_body(program, tests, parser)):
            return program
    return None


def _body(program: str, tests: FunctionTests, parser: SourceParser) -> list[ast.stmt]:
    """Statements of the entry point, its docstring included; none where it is not there or nothing parses."""
    tree = parser.tree(program)
    definition = None if tree is None else find_definition(tree, tests.entry_point)
    return definition.body if definition else []
