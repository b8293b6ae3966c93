"""Rows as columns: what one metric was, thousands of rows in one place, so that a curve is read without parsing."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

PACKED_ROWS = 4096
"""Rows that become columns together; younger ones are read as they are."""


@dataclass(frozen=True)
class Points:
    """Values of one metric in the order in which they were logged.

    Attributes:
        attempts: (points,) int64.
        steps: (points,) int64.
        values: (points,) float64; NaN and infinity are allowed.
    """

    attempts: NDArray[np.int64]
    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.values)

    @classmethod
    def join(cls, parts: Sequence[Points]) -> Points:
        """Several, one behind the other."""
        if not parts:
            return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
        names = ("attempts", "steps", "values")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


Row = tuple[int, int, float, dict[str, Any]]
"""Attempt, step, time in seconds since 1970 and the metrics of a line."""


def columns_of(rows: Sequence[Row]) -> dict[str, Points]:
    """The rows by metric; what is no number is left out."""
    grouped: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:  # rows of one kind have the same metrics, so that they turn into columns at once
        grouped[tuple(row[3])].append(row)
    parts: dict[str, list[Points]] = defaultdict(list)
    for names, members in grouped.items():
        attempts, steps = (np.array([row[place] for row in members], np.int64) for place in (0, 1))
        for name, values in zip(names, zip(*(row[3].values() for row in members))):
            if (numbers := _numbers(values)) is not None:
                parts[name].append(Points(attempts, steps, numbers))
    return {name: Points.join(found) for name, found in parts.items()}


def _numbers(values: Sequence[Any]) -> NDArray[np.float64] | None:
    try:
        return np.array(values, np.float64)  # also of "NaN" and "Infinity", as they stand in the file
    except (TypeError, ValueError):
        return None


def pack(connection: sqlite3.Connection, run: int, last: int, rows: Sequence[Row]) -> None:
    """Write rows as columns.

    Args:
        connection: to the database.
        run: whose rows they are.
        last: id of the last of them in `training_logs`.
        rows: in their order.
    """
    connection.executemany(
        "INSERT OR REPLACE INTO columns VALUES (?, ?, ?, ?, ?, ?)",
        (
            (run, name, last, points.attempts.tobytes(), points.steps.tobytes(), points.values.tobytes())
            for name, points in columns_of(rows).items()
        ),
    )
    connection.execute("UPDATE runs SET last_packed = ? WHERE id = ?", (last, run))


def unpack(connection: sqlite3.Connection, run: int, metric: str, last: int) -> Iterator[Points]:
    """A metric as far as it is packed up to a row, in parts."""
    query = "SELECT attempts, steps, vals FROM columns WHERE run = ? AND metric = ? AND last <= ? ORDER BY last"
    found = connection.execute(query, (run, metric, last))
    for attempts, steps, values in found:
        yield Points(np.frombuffer(attempts, np.int64), np.frombuffer(steps, np.int64), np.frombuffer(values))


def rows_after(connection: sqlite3.Connection, run: int, last: int, limit: int = -1) -> tuple[int, list[Row]]:
    """Rows of a run behind one of them, at most so many: the id of the last, and the rows."""
    query = "SELECT id, attempt, step, time, metrics FROM training_logs WHERE run = ? AND id > ? ORDER BY id LIMIT ?"
    found = connection.execute(query, (run, last, limit)).fetchall()
    rows = [(attempt, step, time, orjson.loads(metrics)) for _, attempt, step, time, metrics in found]
    return (found[-1][0] if found else last), rows
