"""Finds the program of a problem that is solved by standard input and output: no name tells which block it is."""

from __future__ import annotations

import ast

import regex  # unlike `re`, its possessive quantifiers hold before Python 3.11.5

from eval_pipeline.problems.answer_text import code_before, code_blocks
from eval_pipeline.problems.fences import PYTHON_TAGS, FencedBlock, one_line_blocks
from eval_pipeline.problems.python_effects import acts, prints
from eval_pipeline.problems.python_source import (
    SourceParser,
    defined_names,
    imported_names,
    parsing_beginning,
    unknown_names,
)

MAX_BLOCKS = 100
"""The last of an answer; those before are not looked at."""
MAX_STARTS = 8
"""Lines that are tried as the first of a program without a fence."""

_CODE_START = regex.compile(
    r"(?:from[ \t]+[\w.]+[ \t]+import\b|import[ \t]+\w|(?:async[ \t]+def|def|class)[ \t]+\w|@\w"
    r"|(?:for|while|if|with|try)\b.*:|[A-Za-z_][\w.]*+(?:[ \t]*+,[ \t]*+\w++)*+[ \t]*+[-+*/%]?=|[A-Za-z_][\w.]*+\()"
)
# "N = in" and "A.b" broke off and are no prose
_PROSE_START = regex.compile(
    r"[ \t]*+(?:\*{1,3}\w|[-*>] |</?[a-z|]|\(?[A-Z][\w'\u2019]*+(?:,? [a-z(]|[*:!.]*+(?:[ \t]*+$|[ \t]++[^-+*/=\s])))"
)


def whole_program(text: str, parser: SourceParser) -> str:
    """The last block that can be the program: it parses, needs no function of the blocks before it, does something,
    and prints if any does; one that is tagged as Python goes before one without a tag. Where none can be, the last
    Python block, else the last block, else the text; of that the lines between prose, if they are a program. Where
    there is none, a program between fences on one line.

    Args:
        text: an answer with `\\n` line ends.
        parser: of the answer.
    """
    blocks = code_blocks(text)[-MAX_BLOCKS:] or [FencedBlock("", text)]
    if (code := code_before(blocks, text)) is not None:
        blocks = [FencedBlock("", code), *(block for block in blocks if block.body.strip())]
    python = [block for block in blocks if block.tag in PYTHON_TAGS]
    untold = [block for block in blocks if block.tag in ("", *PYTHON_TAGS)]
    trees = _whole_trees(untold, parser)
    for does in (prints, acts):
        for block in (*reversed(python), *reversed(untold)):
            if block in trees and does(trees[block]):
                return block.source
    program = _between_prose((python or blocks)[-1].source, parser)
    tree = None if python else parser.tree(program)
    return program if python or (tree is not None and acts(tree)) else _one_line_program(text, parser) or program


def _whole_trees(blocks: list[FencedBlock], parser: SourceParser) -> dict[FencedBlock, ast.Module]:
    """The blocks that parse and read no name that only blocks before them bind, such as an example of its use."""
    # from the last, for which the limit of characters must not be used up
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
    for start in code_starts(lines)[:MAX_STARTS]:
        program = parsing_beginning(lines[start:], parser)
        tree = parser.tree(program)
        if tree is not None and prints(tree) and _is_prose(lines[start + program.count("\n") :]):
            return program
    return text


def code_starts(lines: list[str]) -> list[int]:
    """Lines that look like code behind one that does not: the rest of a program that is broken is none itself."""
    starts, in_code = [], False
    for index, line in enumerate(lines):
        if line.strip():
            is_code = _CODE_START.match(line) is not None
            if is_code and not in_code:
                starts.append(index)
            in_code = is_code or line[0].isspace()
    return starts


def _is_prose(lines: list[str]) -> bool:
    """Whether what was cut off is prose; code that breaks off makes the whole a syntax error."""
    first = next((line for line in lines if line.strip()), None)
    return first is None or _PROSE_START.match(first) is not None
