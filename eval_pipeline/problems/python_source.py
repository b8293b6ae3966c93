"""Questions about Python sources, answered without running them."""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from collections.abc import Iterator

PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What `ast.parse` raises: the last three for null bytes, thousands of digits and deep nesting."""
MAX_SOURCE_CHARS = 1 << 15
"""Of one source. A longer one is not parsed: no model writes such a program, and some take quadratic time."""
MAX_PARSED_CHARS = 6 * MAX_SOURCE_CHARS
"""Of all sources that one answer is searched for."""
MAX_CUTS = 8
"""One or two find the end of a program in prose; without a bound, hostile text would be parsed once for each line."""


def parse(source: str) -> ast.Module:
    """`ast.parse` without warnings about the source, for example of an invalid escape. Raises `PARSE_ERRORS`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


class SourceParser:
    """Parses what may be the program in one answer: each source once, and all of them within a limit of characters."""

    def __init__(self, max_chars: int = MAX_PARSED_CHARS) -> None:
        """Parse at most `max_chars` characters."""
        self._chars_left = max_chars
        self._results: dict[str, ast.Module | Exception] = {}

    def parse(self, source: str) -> ast.Module:
        """The syntax tree.

        Raises:
            PARSE_ERRORS: it is no Python, or too long, or the limit is reached.
        """
        if len(source) > min(MAX_SOURCE_CHARS, self._chars_left) and source not in self._results:
            raise ValueError("too much to parse")
        if source not in self._results:
            self._chars_left -= len(source)
            try:
                self._results[source] = parse(source)
            except PARSE_ERRORS as error:
                self._results[source] = error
        result = self._results[source]
        if isinstance(result, Exception):
            raise result.with_traceback(None)
        return result

    def tree(self, source: str) -> ast.Module | None:
        """`parse`, or None where it raises."""
        try:
            return self.parse(source)
        except PARSE_ERRORS:
            return None


def parsing_beginning(lines: list[str], parser: SourceParser) -> str:
    """The lines up to the last that leaves a program, cut between top-level statements alone: a function that breaks
    off in the middle would run, and its answer would not be called the syntax error that it is.

    Returns:
        The program, its last line ended; empty where there is none, or none is found in `MAX_CUTS` cuts of at most
        `MAX_SOURCE_CHARS` characters.
    """
    if sum(map(len, lines)) > MAX_SOURCE_CHARS:
        return ""
    for _ in range(MAX_CUTS):
        program = "\n".join(lines).rstrip("\n") + "\n"
        try:
            parser.parse(program)
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
    """Names that a module defines or assigns at its top level, or in a `try`, `if` or the like there, and whether each
    is a class."""
    names: dict[str, bool] = {}
    for node in outside_functions(tree.body, ast.ClassDef):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names[node.name] = isinstance(node, ast.ClassDef)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            names.update({name: False for name in _stored_names(node)})
    return names


def imported_names(tree: ast.Module) -> set[str]:
    """Names that the top level of a module imports."""
    imports = (node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))
    return {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}


def outside_functions(body: list[ast.stmt], *also_left: type[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of these statements but those inside functions, or inside nodes of the other kinds that are given."""
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, *also_left)
    nodes: list[ast.AST] = list(body)
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, inner):
            nodes.extend(ast.iter_child_nodes(node))


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


def defines(source: str, name: str, parser: SourceParser) -> bool:
    """`looks_defined`, or a source that parses defines or assigns the name inside a `try`, `if` or the like."""
    if looks_defined(source, name):
        return True
    if re.search(rf"\b{re.escape(name)}\b", source) is None:
        return False
    tree = parser.tree(source)
    return tree is not None and name in defined_names(tree)


def _stored_names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
