"""Finds the program in a model's answer."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable

import regex  # unlike `re`, its possessive quantifiers hold before Python 3.11.5

from eval_pipeline.judge import FunctionTests, ReferenceAnswer, ScoredAnswer
from eval_pipeline.judge.numeric_answer import after_reasoning
from eval_pipeline.problems.fences import LANGUAGES, PYTHON_TAGS, FencedBlock, fenced_blocks, one_line_blocks
from eval_pipeline.problems.problem import Problem
from eval_pipeline.problems.python_source import (
    SourceParser,
    acts,
    defined_names,
    defines,
    find_definition,
    imported_names,
    is_blank,
    looks_defined,
    parsing_beginning,
    prints,
    returns_a_value,
    unknown_names,
)

MAX_ANSWER_CHARS = 1 << 18
"""Longer than the answers of most models; the program is at the end."""


def extract_program(problem: Problem, answer: str) -> str:
    """The program that is judged for an answer.

    The text after a closed `<think>` is searched first, then the whole text. Function tests: the last fenced Python
    block that defines the entry point (a block without a language tag counts), after the blocks that define what it
    lacks; otherwise the last fenced block, otherwise the text itself, or the definitions in it if prose surrounds them.
    If the result lacks the entry point but continues the code of the problem, it is appended to that code. Programs:
    see `_whole_program`. A reference answer: the text.

    This takes at most about a second: only the last `MAX_ANSWER_CHARS` of a text are searched, and the amount of
    parsing is limited too.

    Args:
        problem: the problem that was asked.
        answer: the model's whole text, including prose and Markdown; it may be cut off anywhere.

    Returns:
        The empty string if there is no program, or only comments, constants and `pass`. Such an answer would run
        without an error, and must not count as code that ran.
    """
    if isinstance(problem.tests, ReferenceAnswer | ScoredAnswer):
        return answer
    text, tests, parser = clean_text(_last_lines(answer)), problem.tests, SourceParser()
    final = after_reasoning(text)
    if isinstance(tests, FunctionTests):
        program = "" if final is None else _function_program(final, tests, parser)
        if not defines(program, tests.entry_point, parser):
            program = _function_program(text, tests, parser)
    else:
        program = "" if final is None else _whole_program(final, parser)
        if not _is_meant_to_run(program, final, parser):
            program = _whole_program(text, parser)
    return "" if is_blank(program, parser) else program


def _last_lines(text: str) -> str:
    if len(text) <= MAX_ANSWER_CHARS:
        return text
    start = len(text) - MAX_ANSWER_CHARS
    return text[text.find("\n", start) + 1 or start :]


def _is_meant_to_run(program: str, final: str | None, parser: SourceParser) -> bool:
    """Whether a program from the final part of an answer does something, or is code from a Python block."""
    if (tree := parser.tree(program)) is not None and acts(tree):
        return True
    if final is None or is_blank(program, parser):
        return False
    return any(block.tag in PYTHON_TAGS for block in code_blocks(final))


def _function_program(text: str, tests: FunctionTests, parser: SourceParser) -> str:
    blocks = code_blocks(text)
    for block in reversed(blocks):
        if block.tag in ("", *PYTHON_TAGS) and defines(block.source, tests.entry_point, parser):
            return _with_needed(block, blocks, parser, lambda tree: not acts(tree))
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


def _with_needed(
    block: FencedBlock, blocks: list[FencedBlock], parser: SourceParser, may_run: Callable[[ast.Module], bool]
) -> str:
    """The source of a block, after the Python blocks that bind names which it, or another needed block, only reads.

    Args:
        block: one of `blocks`.
        blocks: all blocks of a text; the last `MAX_BLOCKS` count.
        parser: of the answer.
        may_run: whether a needed block with this tree may be included.
    """
    if re.search(r"^from __future__ ", block.source, re.MULTILINE):
        return block.source  # nothing may precede this import
    tree = parser.tree(block.source)
    program, unknown = block.source, unknown_names(tree) if tree else set()
    for other in reversed(blocks[-MAX_BLOCKS:]):
        if not unknown:
            break
        tree = parser.tree(other.source) if other is not block and other.tag in ("", *PYTHON_TAGS) else None
        bound = {*defined_names(tree), *imported_names(tree)} if tree else set()
        if tree and unknown & bound and may_run(tree):
            program, unknown = f"{other.source}\n{program}", unknown - bound | unknown_names(tree) - bound
    return program


def _unfenced_program(text: str, tests: FunctionTests, parser: SourceParser) -> str:
    if parser.tree(text) is not None and defines(text, tests.entry_point, parser):
        return text
    lines = text.split("\n")
    wanted = [index for index, line in enumerate(lines) if looks_defined(line, tests.entry_point)]
    for start in [*_code_starts(lines)[:MAX_STARTS], *wanted[-1:]]:
        program = parsing_beginning(lines[start:], parser)
        if defines(program, tests.entry_point, parser):
            return program
    return text if wanted else _continued(text, tests, parser) or text


def _continued(text: str, tests: FunctionTests, parser: SourceParser) -> str | None:
    """The code of the problem followed by `text`, if that is a program whose entry point is longer with it."""
    if not tests.code_prompt:
        return None
    body = text.strip("\n")
    program = parsing_beginning(f"{tests.code_prompt}{body}".split("\n"), parser)
    if len(_body(program, tests, parser)) > len(_body(tests.code_prompt, tests, parser)):
        return program
    # the tokenizer may lose the indentation of the first line, or all of it; a `return` tells code from output
    for indented in ("    " + body.lstrip(), textwrap.indent(textwrap.dedent(body), "    ")):
        program = parsing_beginning(f"{tests.code_prompt}{indented}".split("\n"), parser)
        if returns_a_value(_body(program, tests, parser)):
            return program
    return None


def _body(program: str, tests: FunctionTests, parser: SourceParser) -> list[ast.stmt]:
    """The statements of the entry point, docstring included; none if it is missing or the program does not parse."""
    tree = parser.tree(program)
    definition = None if tree is None else find_definition(tree, tests.entry_point)
    return definition.body if definition else []


# Problems that are solved by standard input and output: no name tells which block is the program

MAX_BLOCKS = 100
"""Maximum number of blocks, counted from the end of an answer; earlier ones are ignored."""
MAX_STARTS = 8
"""Maximum number of lines that are tried as the first line of a program without a fence."""

_CODE_START = regex.compile(
    r"(?:from[ \t]+[\w.]+[ \t]+import\b|import[ \t]+\w|(?:async[ \t]+def|def|class)[ \t]+\w|@\w"
    r"|(?:for|while|if|with|try)\b.*:|[A-Za-z_][\w.]*+(?:[ \t]*+,[ \t]*+\w++)*+[ \t]*+[-+*/%]?=|[A-Za-z_][\w.]*+\()"
)
# "N = in" and "A.b" are broken code, not prose
_PROSE_START = regex.compile(
    r"[ \t]*+(?:\*{1,3}\w|[-*>] |</?[a-z|]|\(?[A-Z][\w'\u2019]*+(?:,? [a-z(]|[*:!.]*+(?:[ \t]*+$|[ \t]++[^-+*/=\s])))"
)


def _whole_program(text: str, parser: SourceParser) -> str:
    """The last block that can be the program.

    That is, it parses, needs no function of earlier blocks, does something, and prints if any block does; blocks tagged
    as Python come before untagged ones. If none prints, take the last block after the blocks that define what it lacks,
    if they print together. If there is none, take the last Python block, or else the last block, or else the text, and
    of that the lines between prose if they are a program. If that is not a program either, take one between fences on
    one line.
    """
    blocks = code_blocks(text)[-MAX_BLOCKS:] or [FencedBlock("", text)]
    if (code := code_before(blocks, text)) is not None:
        blocks = [FencedBlock("", code), *(block for block in blocks if block.body.strip())]
    python = [block for block in blocks if block.tag in PYTHON_TAGS]
    candidates = [block for block in blocks if block.tag in ("", *PYTHON_TAGS)]
    trees = _whole_trees(candidates, parser)
    for does in (prints, acts):
        for block in (*reversed(python), *reversed(candidates)):
            if block in trees and does(trees[block]):
                return block.source
        if candidates and (split := _split_program((python or candidates)[-1], candidates, parser)) is not None:
            return split
    program = _between_prose((python or blocks)[-1].source, parser)
    tree = None if python else parser.tree(program)
    return program if python or (tree is not None and acts(tree)) else _one_line_program(text, parser) or program


def _split_program(last: FencedBlock, blocks: list[FencedBlock], parser: SourceParser) -> str | None:
    """The last block with the blocks that it needs; None if it needs none, or does not print with them."""
    program = _with_needed(last, blocks, parser, lambda tree: True)
    tree = parser.tree(program)
    return program if program != last.source and tree is not None and prints(tree) else None


def _whole_trees(blocks: list[FencedBlock], parser: SourceParser) -> dict[FencedBlock, ast.Module]:
    """The blocks that parse and read no name that only earlier blocks bind, unlike an example of use."""
    # start from the last block, so that earlier ones do not use up its characters
    parsed = {block: tree for block in reversed(blocks) if (tree := parser.tree(block.source)) is not None}
    trees: dict[FencedBlock, ast.Module] = {}
    bound: set[str] = set()
    for block in blocks:
        if (tree := parsed.get(block)) is not None:
            if not unknown_names(tree) & bound:
                trees[block] = tree
            bound.update(defined_names(tree), imported_names(tree))
    return trees


def _one_line_program(text: str, parser: SourceParser) -> str | None:
    blocks = one_line_blocks(text)[-MAX_BLOCKS:]
    for block in (*(block for block in reversed(blocks) if block.tag), *reversed(blocks)):
        tree = parser.tree(block.body)
        if tree is not None and prints(tree):
            return block.body
    return None


def _between_prose(text: str, parser: SourceParser) -> str:
    if parser.tree(text) is not None:
        return text
    lines = text.split("\n")
    for start in _code_starts(lines)[:MAX_STARTS]:
        program = parsing_beginning(lines[start:], parser)
        tree = parser.tree(program)
        if tree is not None and prints(tree) and _is_prose(lines[start + program.count("\n") :]):
            return program
    return text


def _code_starts(lines: list[str]) -> list[int]:
    """Lines that look like code and follow one that does not: the rest of a broken program is not a program."""
    starts, in_code = [], False
    for index, line in enumerate(lines):
        if line.strip():
            is_code = _CODE_START.match(line) is not None
            if is_code and not in_code:
                starts.append(index)
            in_code = is_code or line[0].isspace()
    return starts


def _is_prose(lines: list[str]) -> bool:
    """Whether the text after a program is prose; broken code there makes the whole a syntax error."""
    first = next((line for line in lines if line.strip()), None)
    return first is None or _PROSE_START.match(first) is not None


# The text of an answer and its blocks, for all kinds of problems

_BYTE_ORDER_MARK = re.compile("^\ufeff+", re.MULTILINE)
# MBPP's own prompt asks for code between these (Austin et al. 2021, section 3)
_MARKER = re.compile(r"^[ \t]*\[(?:(?P<begin>BEGIN)\][ \t]*$|DONE\].*$)", re.MULTILINE)
# a block of Markdown in a quote, and one of HTML
_QUOTED_BLOCK = re.compile(r"^[ \t]*>[ \t]*(?:```|~~~).*(?:\n[ \t]*>.*)*", re.MULTILINE)
_QUOTE = re.compile(r"^[ \t]*> ?", re.MULTILINE)
_HTML_BLOCK = re.compile(
    r"(?<![\"'])<pre\b[^<>\n]{0,80}>\s{0,4}<code\b(?:[^<>\n]{0,80}?language-(\w{1,20}))?[^<>\n]{0,80}>"
)
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&#39;": "'", "&#x27;": "'"}


def clean_text(answer: str) -> str:
    """The answer with `\\n` line ends, without byte-order marks, and with fences around each block of code.

    Fences replace MBPP's `[BEGIN]` and `[DONE]`, and `<pre><code>`. Blocks in `>` quotes lose the quote's marks.
    """
    text = _BYTE_ORDER_MARK.sub("", answer.replace("\r\n", "\n"))
    text = _QUOTED_BLOCK.sub(lambda block: _QUOTE.sub("", block[0]), text)
    text = text if "```" in text else _fenced_html(text)
    first = _MARKER.search(text)
    if first is None:
        return text
    if "```" in text:
        return _MARKER.sub("", text)
    if not first["begin"]:  # the prompt ended with [BEGIN]
        text = f"[BEGIN]\n{text}"
    return _MARKER.sub(lambda marker: "```python" if marker["begin"] else "```", text)


def _fenced_html(text: str) -> str:
    first, *parts = _HTML_BLOCK.split(text)
    return first + "".join(map(_fenced, parts[::2], parts[1::2]))


def _fenced(tag: str | None, text: str) -> str:
    """The text after `<pre><code>`, with fences around the code that it begins with."""
    code, _, after = text.partition("</code>")
    code = re.sub("|".join(_ENTITIES), lambda entity: _ENTITIES[entity[0]], code).strip("\n")
    return f"\n```{tag or ''}\n{code}\n```\n{after.removeprefix('</pre>')}"


def code_blocks(text: str) -> list[FencedBlock]:
    """The fenced blocks that are not empty; if all are empty, all of them."""
    blocks = fenced_blocks(text)
    return [block for block in blocks if block.body.strip()] or blocks


def code_before(blocks: list[FencedBlock], text: str) -> str | None:
    """The code of an answer that began inside a block: the text before its only fence, which ends code.

    None if the answer has other fences.
    """
    if len(blocks) != 1 or blocks[0].closed or blocks[0].tag in LANGUAGES:
        return None
    return re.split(r"```|^[ \t]*~~~", text, maxsplit=1, flags=re.MULTILINE)[0]
