"""What a command says at its end, the same form for each: what is done, where things lie, what to type next.

Its tables, too, have one form.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext.tell import tell

NAME_WIDTH = 15
"""Columns of a name; all names of a summary take as many as the longest where one is longer."""


def tell_summary(
    done: str, rows: Mapping[str, Any] | None = None, next_words: Sequence[object] = (), *, table: str = ""
) -> None:
    """Print it.

    Args:
        done: what was done to what, such as `Finished: my_run (sft)`.
        rows: facts by name, in their order; those that are None are left out.
        next_words: the command that goes on from here, if there is one.
        table: lines that come before the rows.
    """
    shown = {name: value for name, value in (rows or {}).items() if value is not None}
    width = max([NAME_WIDTH, *map(len, shown)])
    lines = [done, *(f"  {line}" for line in table.splitlines())]
    lines += [f"  {name:<{width}} {value}" for name, value in shown.items()]
    if next_words:
        lines.append(f"Next: {shlex.join(map(str, next_words))}")
    tell("\n".join(lines))


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
