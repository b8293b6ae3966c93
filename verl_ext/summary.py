"""What a command prints at its end, in one form for all: what was done, the results and paths, the next commands.

Tables have one form, too.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ext.tell import tell

NAME_WIDTH = 15
"""Columns of a name; all names of a summary take as many as the longest where one is longer."""
REPOSITORY = Path(__file__).resolve().parents[1]
NEXT = "Next: "


def tell_summary(
    done: str, rows: Mapping[str, Any] | None = None, next_words: Sequence[object] = (), *, table: str = ""
) -> None:
    """Print it.

    Args:
        done: what was done to what, such as `Finished: my_run (sft)`.
        rows: facts by name, in their order; those that are None are left out.
        next_words: the command to run next, if there is one.
        table: lines that come before the rows.
    """
    shown = {name: value for name, value in (rows or {}).items() if value is not None}
    width = max([NAME_WIDTH, *map(len, shown)])
    lines = [done, *(f"  {line}" for line in table.splitlines())]
    lines += [f"  {name:<{width}} {value}" for name, value in shown.items()]
    tell("\n".join(lines))
    tell_next([next_words])


def tell_next(commands: Sequence[Sequence[object]]) -> None:
    """Print the commands to run next, one per line; empty ones are left out."""
    typed = [shlex.join(map(str, words)) for words in commands if words]
    if typed:
        tell(NEXT + f"\n{' ' * len(NEXT)}".join(typed))


def typed_path(path: str | Path) -> str:
    """A path as a user types it: relative to the repository for one inside it, absolute otherwise.

    A command that was typed outside the repository gets absolute paths, which work from there as well.
    """
    absolute = Path(path).absolute()
    typed_in = Path(os.environ.get("VERL_EXT_CALLED_FROM", "."))
    if typed_in.resolve() == REPOSITORY and absolute.is_relative_to(REPOSITORY):
        return str(absolute.relative_to(REPOSITORY))
    return str(absolute)


def typed_script(name: str) -> list[str]:
    """The words that start one of the repository's scripts, such as `bash run_sft.sh`."""
    return ["bash", typed_path(REPOSITORY / name)]


def typed_module(name: str) -> list[str]:
    """The words that start a module with the interpreter of this process, such as `.venv/bin/python -m NAME`."""
    return [typed_path(sys.executable), "-m", name]


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Cells in aligned columns, two spaces apart.

    Args:
        rows: at least one, with equally many cells each.
    """
    return "\n".join(aligned(rows))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The same with a line for each row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]
