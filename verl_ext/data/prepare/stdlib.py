"""`stdlib`: documented functions of the installed Python's standard library become code samples."""

from __future__ import annotations

import argparse
import sysconfig
from collections import Counter
from pathlib import Path

from verl_ext.console import progress_bar
from verl_ext.data.prepare.files import Row
from verl_ext.data.prepare.functions import DocumentedFunction, documented_functions
from verl_ext.data.prepare.split import FILES_OF_A_RUN, add_split_arguments, write_split
from verl_ext.data.prepare.stamp import Prepared
from verl_ext.errors import UserError

HELP = "Make (signature and docstring -> function) samples from the installed Python's standard library."
EXAMPLE = "stdlib --output data/stdlib"
NEXT = "sft 2 recipe=smollm2_135m " + FILES_OF_A_RUN
VERSION = 1
SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}
INSTRUCTION = "Complete this Python function. Answer with the whole function, without its docstring."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `stdlib`."""
    parser.add_argument("--source", metavar="DIR", help="another source tree (default: the standard library)")
    add_split_arguments(parser)


def run(arguments: argparse.Namespace) -> Prepared:
    """Write both files, split by source file, in the order of the file names.

    The assistant's turn is the whole function without its docstring, in a python fence: it can be run as it stands,
    and a model that has learned to repeat the signature answers prompts in the style of HumanEval.

    Raises:
        UserError: `--source` is no directory, or holds too few documented functions to split.
    """
    root = Path(arguments.source or sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise UserError(f"{root} is not a directory; give the root of a Python source tree by --source")
    counts: Counter[str] = Counter(files=0, files_not_parsed=0, functions=0, duplicate=0)
    rows = _collect(root, counts)
    groups = [row["source"] for row in rows]
    written = write_split(Path(arguments.output), rows, groups, arguments.val_fraction, arguments.seed)
    return Prepared([f"{name}.parquet" for name in written], {**counts, **written})


def _collect(root: Path, counts: Counter[str]) -> list[Row]:
    unique: dict[str, Row] = {}
    for path in progress_bar(_source_files(root), desc="reading sources", unit="files"):
        counts["files"] += 1
        try:
            functions = documented_functions(path.read_bytes())
        except (SyntaxError, ValueError):
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
