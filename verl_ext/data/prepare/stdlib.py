"""`stdlib`: converts documented functions of the installed Python's standard library to code samples."""

from __future__ import annotations

import argparse
import ast
import io
import sysconfig
import textwrap
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_ext.console import progress_bar
from verl_ext.data.prepare.command import PrepareCommand, PrepareResult
from verl_ext.data.prepare.tables import Row, add_split_arguments, run_overrides, write_split
from verl_ext.errors import UserError, first_line_of

SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}
INSTRUCTION = "Complete this Python function. Answer with the whole function, without its docstring."
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `stdlib`."""
    parser.add_argument("--source", metavar="DIR", help="another source tree (default: the standard library)")
    add_split_arguments(parser)


def prepare_stdlib(arguments: argparse.Namespace) -> PrepareResult:
    """Write both files, split by source file, in the order of the file names.

    The assistant's turn is the whole function without its docstring, in a python fence. It runs without changes, and a
    model that learns to repeat the signature can answer prompts in the style of HumanEval.

    Raises:
        UserError: `--source` is not a directory, or holds too few documented functions to split.
    """
    root = Path(arguments.source or sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise UserError(f"{root} is not a directory; specify the root of a Python source tree with --source")
    counts: Counter[str] = Counter(files=0, files_not_parsed=0, functions=0, duplicate=0)
    rows = _collect_rows(root, counts)
    groups = [row["source"] for row in rows]
    written = write_split(Path(arguments.output), rows, groups, arguments.val_fraction, arguments.seed, "source file")
    files = [f"{name}.parquet" for name in written]
    return PrepareResult(files, {**counts, **written}, next_overrides=run_overrides(files))


def _collect_rows(root: Path, counts: Counter[str]) -> list[Row]:
    unique: dict[str, Row] = {}
    for path in progress_bar(_source_files(root), desc="reading sources", unit="files"):
        counts["files"] += 1
        try:
            functions = documented_functions(path.read_bytes())
        except OSError as error:
            raise UserError(f"cannot read {path} ({first_line_of(error)}); make it readable or remove it") from error
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
            counts["files_not_parsed"] += 1
            continue
        for function in functions:
            counts["functions"] += 1
            counts["duplicate"] += function.code in unique
            unique.setdefault(function.code, _to_row(function, path.relative_to(root).as_posix()))
    return list(unique.values())


def _source_files(root: Path) -> list[Path]:
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(root / path for path in paths if not SKIPPED_DIRECTORIES.intersection(path.parts))


def _to_row(function: DocumentedFunction, source: str) -> Row:
    messages = [
        {"role": "user", "content": f"{INSTRUCTION}\n```python\n{function.stub}\n```"},
        {"role": "assistant", "content": f"```python\n{function.code}\n```"},
    ]
    return {"messages": messages, "source": source, "name": function.name}


@dataclass(frozen=True)
class DocumentedFunction:
    """A function or method, dedented; `stub` ends with the docstring and `code` has none."""

    name: str
    stub: str
    code: str


def documented_functions(source: bytes) -> list[DocumentedFunction]:
    """Find the functions and methods with a docstring and further code, in file order.

    Skips nested functions, which mean little without their context, and functions whose docstring cannot be removed
    line by line without changing their meaning.

    Args:
        source: content of a Python file, in the encoding that it declares.

    Raises:
        SyntaxError: the file does not parse.
        ValueError: the file holds null bytes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old files have escapes that newer Pythons warn about
        tree = ast.parse(source)
        # Split lines like the parser: ast's line numbers count \n, \r\n and \r, but not form feeds.
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        lines = list(io.StringIO(source.decode(encoding), newline=None))
        functions = (_cut_function(node, lines) for node in _function_nodes(tree))
        return [function for function in functions if function is not None]


def _function_nodes(tree: ast.Module | ast.ClassDef) -> Iterator[FunctionNode]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _function_nodes(node)
        elif isinstance(node, FunctionNode) and ast.get_docstring(node) and len(node.body) > 1:
            yield node


def _cut_function(node: FunctionNode, lines: list[str]) -> DocumentedFunction | None:
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
    """Compare syntax trees; they differ if the docstring shares its line, or if a string contains the indentation."""
    try:
        written = ast.parse(code).body
    except SyntaxError:
        return False
    expected = [*node.decorator_list, *node.body[1:]]
    if len(written) != 1 or not isinstance(written[0], FunctionNode):
        return False
    actual = [*written[0].decorator_list, *written[0].body]
    return [ast.dump(item) for item in actual] == [ast.dump(item) for item in expected]


COMMAND = PrepareCommand(
    name="stdlib",
    help="Create samples that map a signature and docstring to the function, from the installed standard library.",
    example="stdlib --output data/stdlib",
    next_command="sft 2 recipe=smollm2_135m",
    version=1,
    add_arguments=add_arguments,
    run=prepare_stdlib,
)
