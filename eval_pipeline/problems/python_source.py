"""Questions about Python sources, answered without running them."""

from __future__ import annotations

import ast
import builtins
import re
import warnings

PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What `ast.parse` raises: the last three for null bytes, thousands of digits and deep nesting."""
MAX_CUTS = 8
"""One or two find the end of a program in prose; without a bound, hostile text would be parsed once for each line."""
MAX_CUT_CHARS = 100_000
"""Longer than any program among prose."""


def parse(source: str) -> ast.Module:
    """`ast.parse` without warnings about the source, for example of an invalid escape. Raises `PARSE_ERRORS`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def parse_or_none(source: str) -> ast.Module | None:
    """`parse`, or None where the source is no Python."""
    try:
        return parse(source)
    except PARSE_ERRORS:
        return None


def parsing_beginning(lines: list[str]) -> str:
    """The lines up to the last that leaves a program, cut between top-level statements alone: a function that breaks
    off in the middle would run, and its answer would not be called the syntax error that it is.

    Returns:
        The program, its last line ended; empty where there is none, or none is found in `MAX_CUTS` cuts of at most
        `MAX_CUT_CHARS` characters.
    """
    if sum(map(len, lines)) > MAX_CUT_CHARS:
        return ""
    for _ in range(MAX_CUTS):
        program = "\n".join(lines).rstrip("\n") + "\n"
        try:
            parse(program)
        except SyntaxError as error:
            end = min((error.lineno or 1) - 1, len(lines) - 1)  # what comes after the error cannot mend it
            while end > 0 and not lines[end][:1].strip():
                end -= 1
            lines = lines[:end]
        except PARSE_ERRORS:
            return ""
        else:
            return program if lines else ""
    return ""


def find_definition(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
    """The last top-level function or class of this name."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return next((node for node in reversed(tree.body) if isinstance(node, kinds) and node.name == name), None)


def first_line(definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """Line number, from 1, where a definition starts, decorators included."""
    return min([definition.lineno, *(decorator.lineno for decorator in definition.decorator_list)])


def defined_names(tree: ast.Module) -> dict[str, bool]:
    """Names that the top level of a module defines or assigns, and whether each is a class."""
    names: dict[str, bool] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names[node.name] = isinstance(node, ast.ClassDef)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            names.update({name: False for name in _stored_names(node)})
    return names


def called_names(tree: ast.AST) -> list[str]:
    """Names that are called, in the order in which they stand in the source."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return [name.id for name in sorted(calls, key=lambda name: (name.lineno, name.col_offset))]


def runs_alone(tree: ast.Module) -> bool:
    """Whether a module reads only names that it defines or imports itself, or that are built in."""
    return not unknown_names(tree)


def unknown_names(tree: ast.Module) -> set[str]:
    """Names that a module reads but neither defines nor imports itself, and that are not built in."""
    nodes = list(ast.walk(tree))
    known = set(dir(builtins)) | _stored_names(tree) | {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            known.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            known.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            known.add(node.name)
    return {node.id for node in nodes if isinstance(node, ast.Name)} - known


def looks_defined(source: str, name: str) -> bool:
    """Whether the top level of a source defines or assigns `name`, even where the source does not parse."""
    pattern = rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{re.escape(name)}\b|^{re.escape(name)}[ \t]*(?::[^=\n]+)?=(?!=)"
    return re.search(pattern, source, re.MULTILINE) is not None


def _stored_names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
