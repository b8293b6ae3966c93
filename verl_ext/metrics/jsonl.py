"""`metrics.jsonl`, the record of a run: every row ever logged, across all attempts."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_ext.console import warn
from verl_ext.errors import UserError
from verl_ext.files import LATEST, LineWriter, drop_torn_tail, end_with_newline, parse_json, write_errors
from verl_ext.metrics.row import Row, plain_numbers

METRICS_FILE = "metrics.jsonl"

# JSON has no non-finite numbers; the strings are read by every parser, and by `float` in Python and in JavaScript.
_NON_FINITE = ("NaN", "Infinity", "-Infinity")


class MetricsFile:
    """Appends rows to `metrics.jsonl`, one JSON object a line, each on its way to the disk when `append` returns."""

    def __init__(self, path: Path, attempt: int) -> None:
        """Open the file, first mending a last line that a kill left torn.

        Args:
            path: the file; it and its directory are created when missing.
            attempt: which start of the run writes here, from 1.

        Raises:
            UserError: the file cannot be opened for writing.
        """
        self._path = Path(path)
        self._attempt = attempt
        with write_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                drop_torn_tail(self._path, lambda line: _parse(line) is not None)
                end_with_newline(self._path)
            self._writer = LineWriter(self._path)

    def append(self, step: int, metrics: Mapping[str, float]) -> Row:
        """Write one row, stamped with the attempt and the present time.

        Args:
            step: optimizer steps since the run began.
            metrics: value by metric name; non-finite values are allowed.

        Returns:
            The row as written.

        Raises:
            UserError: a value is not a number, or the disk refuses the line.
        """
        row = Row(int(step), self._attempt, time.time(), plain_numbers(metrics))
        with write_errors(self._path):
            self._writer.write(_encode(row))
        return row

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read every row of a `metrics.jsonl`, also while a run is writing it.

    Args:
        path: the file.

    Returns:
        One dictionary a row, oldest first, with `step`, `attempt`, `time` (seconds since 1970) and the metrics.
        A torn last line is left out silently: its writer may be in the middle of it. Any other unreadable line is
        left out with a warning.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    return list(iterate_metrics(path))


def iterate_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Give the rows of `read_metrics` one at a time, without holding them all in memory."""
    try:
        with open(path, "rb") as file:
            yield from _iterate_lines(file, path)
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); make it readable") from error


def _iterate_lines(lines: Iterable[bytes], path: Path) -> Iterator[dict[str, Any]]:
    unreadable = None
    for number, line in enumerate(lines, start=1):
        if unreadable is not None:
            warn(f"line {unreadable} of {path} is not a row of metrics and was left out")
        row = _parse(line)
        unreadable = number if row is None else None
        if row is not None:
            yield row


def _encode(row: Row) -> str:
    metrics = {name: _encode_number(value) for name, value in row.metrics.items()}
    return json.dumps({"step": row.step, "attempt": row.attempt, "time": row.time, **metrics}, allow_nan=False)


def _encode_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the row of one line, or None where the line is not one."""
    try:
        row = parse_json(line)
    except ValueError:  # also what bytes that are not UTF-8 raise
        return None
    if not isinstance(row, dict) or not _has_keys(row):
        return None
    row = _decode_numbers(row)
    return row if all(map(_is_number, row.values())) else None


def _has_keys(row: dict[str, Any]) -> bool:
    whole = all(type(row.get(name)) is int and 0 <= row[name] < 2**63 for name in ("step", "attempt"))
    return whole and _is_number(row.get("time")) and 0 <= row["time"] < LATEST


def _is_number(value: Any) -> bool:
    """Whether it is one that a float can hold, if not exactly."""
    return type(value) is float or (type(value) is int and abs(value) < 10**300)


def _decode_numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {name: float(value) if value in _NON_FINITE else value for name, value in row.items()}
