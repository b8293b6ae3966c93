"""A run's metrics as a CSV file for spreadsheets."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson

from verl_ext.monitor.store.database import open_database

KEYS = ("step", "attempt", "time")
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of one."""


class _Line:
    """What `csv.writer` writes to; its `writerow` gives back the line."""

    @staticmethod
    def write(line: str) -> str:
        return line


def csv_lines(database: Path, run: int) -> Iterator[str]:
    """A run's rows as lines of CSV, with a column for every metric that it ever had.

    Args:
        database: of the monitor; it is opened here, since a server makes its answers in other threads.
        run: id.
    """
    query = "SELECT step, attempt, time, metrics FROM training_logs WHERE run = ? ORDER BY id"
    writer = csv.writer(_Line(), lineterminator="\n")
    with closing(open_database(database)) as connection:
        rows = connection.execute("SELECT metrics FROM training_logs WHERE run = ? ORDER BY id", (run,))
        names = dict.fromkeys(name for (text,) in rows for name in orjson.loads(text))
        yield writer.writerow([*KEYS, *map(without_formula, names)])
        for step, attempt, time, text in connection.execute(query, (run,)):
            metrics = orjson.loads(text)
            yield writer.writerow([step, attempt, time, *(without_formula(metrics.get(name, "")) for name in names)])


def without_formula(value: Any) -> Any:
    """A value as it is; a text that a spreadsheet would compute gets a quote in front."""
    is_formula = isinstance(value, str) and value.startswith(_FORMULAS) and value != "-Infinity"
    return f"'{value}" if is_formula else value
