"""Documented functions of a Python source file, each cut into what is given and what is to be written."""

from __future__ import annotations

import ast
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class DocumentedFunction:
    """A function or method, dedented; `stub` ends with the docstring and `code` has none."""

    name: str
    stub: str
    code: str


def documented_functions(source: bytes) -> list[DocumentedFunction]:
    """Find the functions and methods that have a docstring and code after it, in the order of the file.

    Functions inside functions are left out, since they mean little without what surrounds them; so are those whose
    text cannot be cut line by line without changing what it means.

    Args:
        source: the bytes of a Python file, in the encoding that it declares.

    Raises:
        SyntaxError: the file does not parse.
        ValueError: the file holds null bytes.
    """
    with warnings.catch_warnings():
        # Old files have escapes that newer Pythons warn about; they are not ours to mend.
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
        # As the parser does: ast's line numbers count \n, \r\n and \r, but no form feed.
        lines = ast_lines(source)
        cut = (_cut(node, lines) for node in _function_nodes(tree))
        return [function for function in cut if function is not None]


def ast_lines(source: bytes) -> list[str]:
    """Split a source file into the lines that `ast` numbers from 1.

    Args:
        source: the bytes of a Python file that parses.
    """
    import io
    import tokenize

    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    return list(io.StringIO(source.decode(encoding), newline=None))


def _function_nodes(tree: ast.Module | ast.ClassDef) -> Iterator[FunctionNode]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _function_nodes(node)
        elif isinstance(node, FunctionNode) and ast.get_docstring(node) and len(node.body) > 1:
            yield node


def _cut(node: FunctionNode, lines: list[str]) -> DocumentedFunction | None:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    docstring = node.body[0]
    signature = lines[first - 1 : docstring.lineno - 1]
    body = lines[docstring.end_lineno : node.end_lineno]
    code = _dedent(signature + body)
    stub = _dedent(lines[first - 1 : docstring.end_lineno])
    return DocumentedFunction(node.name, stub, code) if _means_the_same(code, node) else None


def _dedent(lines: list[str]) -> str:
    return textwrap.dedent("".join(lines)).strip("\n")


def _means_the_same(code: str, node: FunctionNode) -> bool:
    """Compare syntax trees: cutting goes wrong when the docstring shares its line, or a string holds the margin."""
    try:
        written = ast.parse(code).body
    except SyntaxError:
        return False
    expected = [*node.decorator_list, *node.body[1:]]
    if len(written) != 1 or not isinstance(written[0], FunctionNode):
        return False
    actual = [*written[0].decorator_list, *written[0].body]
    return [ast.dump(item) for item in actual] == [ast.dump(item) for item in expected]
