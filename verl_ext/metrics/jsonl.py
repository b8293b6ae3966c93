"""`metrics.jsonl`, samples and their tokens, `events.jsonl`: the append-only record of a run over all attempts."""

from __future__ import annotations

import json
import math
import numbers
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from verl_ext.console import warn
from verl_ext.errors import UserError
from verl_ext.files import LATEST, LineWriter, parse_json, write_errors

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
SAMPLE_TOKENS_FILE = "sample_tokens.jsonl"
EVENTS_FILE = "events.jsonl"
KEY_COLUMNS = ("step", "attempt", "time")
READ_BYTES = 1 << 20
"""Size of the reads from `metrics.jsonl`."""
MAX_STEP = 1 << 53
"""Larger numbers are not steps."""
SampleRow = Mapping[str, str | float | None]

# JSON has no non-finite numbers. Every parser reads these strings, and so does `float` in Python and in JavaScript.
_NON_FINITE = ("NaN", "Infinity", "-Infinity")


class MetricsRow(NamedTuple):
    """Metrics that were logged together.

    Attributes:
        step: number of training steps since the run started.
        attempt: number of the attempt (start) of the run, from 1.
        time: time of logging, in seconds since 1970.
        metrics: value by metric name; in a file of another program, values may have any type.
    """

    step: int
    attempt: int
    time: float
    metrics: dict[str, Any]


def is_training_row(metrics: Iterable[str]) -> bool:
    """Whether metrics are those of a training step, not of a validation or a save."""
    return any(name.startswith("train/") for name in metrics)


@dataclass(frozen=True)
class HealthEvent:
    """A finding of the health rule `name`; `level` is ok, notice, warning or alarm."""

    step: int
    name: str
    level: str
    text: str
    time: float = field(default_factory=time.time)

    def record(self) -> dict[str, str | float]:
        """The event for `events.jsonl`, where `step` is a column of every record."""
        return {name: value for name, value in asdict(self).items() if name != "step"}


class JsonlFile:
    """Appends records of an attempt, one JSON object per line; the first record creates the file."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._path, self._attempt = path, attempt
        self._writer: LineWriter | None = None

    def append(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write some records of one step.

        Raises:
            UserError: the file cannot be written.
        """
        with write_errors(self._path):
            self._writer = self._writer or LineWriter.reopen(self._path, lambda line: parse_object(line) is not None)
            for row in rows:
                self._writer.write(json.dumps({"step": step, "attempt": self._attempt, **row}, ensure_ascii=False))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._writer is not None:
            self._writer.close()


class MetricsFile:
    """Appends rows to `metrics.jsonl`; a row has reached the operating system when `append` returns.

    Args:
        path: path of the file; the file and its directory are created if they are missing.

    Raises:
        UserError: the file cannot be opened for writing.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self._path, self._attempt = Path(path), attempt
        with write_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = LineWriter.reopen(self._path, lambda line: isinstance(parse_row(line), MetricsRow))

    def append(self, step: int, metrics: Mapping[str, float]) -> MetricsRow:
        """Write one row, with the attempt and the current time, and return it.

        Args:
            metrics: value by metric name; non-finite values are allowed.

        Raises:
            UserError: a value is not a number, or the file cannot be written.
        """
        row = MetricsRow(int(step), self._attempt, time.time(), _plain_numbers(metrics))
        with write_errors(self._path):
            self._writer.write(_encode(row))
        return row

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all rows of a `metrics.jsonl`, even while a run writes it.

    Returns:
        One dictionary per row, oldest first, with `step`, `attempt`, `time` (seconds since 1970) and the metrics,
        without values that are not numbers. A torn last line is skipped silently, because its writer may not have
        finished it. Other lines that are not rows are skipped with one warning.

    Raises:
        UserError: the file is missing or cannot be read.
    """
    return list(iter_metrics(path))


def iter_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of `read_metrics` one at a time, without holding them all in memory."""
    num_skipped, first, reason, number = 0, "", "", 0
    try:
        # few reads, because each lets another thread of the monitor run first
        with open(path, "rb", buffering=READ_BYTES) as file:
            for number, line in enumerate(file, start=1):
                if reason:  # of the line before, which is not the last one
                    num_skipped, first = num_skipped + 1, first or f"line {number - 1}: {reason}"
                row = parse_row(line)
                reason = row if isinstance(row, str) else ""
                if isinstance(row, MetricsRow):
                    keys = {"step": row.step, "attempt": row.attempt, "time": row.time}
                    yield {**keys, **_numbers_of(row.metrics)}
        if num_skipped:
            warn(
                f"skipped {num_skipped} of {number} lines of {path} that are not rows of metrics; the first is {first}"
            )
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); make it readable") from error


def _plain_numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Convert NumPy scalars and one-element tensors to `int` or `float`."""
    for reserved in KEY_COLUMNS:
        if reserved in metrics:
            raise UserError(f"a metric cannot be named '{reserved}', which is a column of every row; rename it")
    return {name: _plain_number(name, value) for name, value in metrics.items()}


def _plain_number(name: str, value: float) -> float:
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"the metric '{name}' must be a number, not {value!r}") from error


def _encode(row: MetricsRow) -> str:
    metrics = {name: value if math.isfinite(value) else json.dumps(value) for name, value in row.metrics.items()}
    return json.dumps({"step": row.step, "attempt": row.attempt, "time": row.time, **metrics}, allow_nan=False)


def parse_row(line: bytes) -> MetricsRow | str:
    """Return the row of a line, whose metrics may have any type; a reason if the line is not a row."""
    metrics = parse_object(line)
    if metrics is None:
        return "it is not a JSON object"
    step, attempt, time = metrics.pop("step", None), metrics.pop("attempt", None), metrics.pop("time", None)
    if not is_count(step) or not is_count(attempt):
        return f"its {'attempt' if is_count(step) else 'step'} is missing or is not an integer of at least 0"
    if not (type(time) is float or type(time) is int) or not 0 <= time < LATEST:
        return "its time is missing or is not a number of seconds since 1970"
    return MetricsRow(step, attempt, time, metrics)


def is_count(value: Any) -> bool:
    """Whether a value can be a step or an attempt."""
    return type(value) is int and 0 <= value < MAX_STEP


def _numbers_of(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers; those of our own files all are."""
    for name, value in list(metrics.items()):
        if type(value) is float:
            continue
        if not is_number(value):
            del metrics[name]
        elif isinstance(value, str):
            metrics[name] = float(value)
    return metrics


def is_number(value: Any) -> bool:
    """Whether a value of `metrics.jsonl` is a number that a float can represent, perhaps rounded."""
    if isinstance(value, str):
        return value in _NON_FINITE
    return type(value) is float or (type(value) is int and abs(value) < 10**300)


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line, which may have NaN and Infinity as numbers; None if it is not an object."""
    import orjson  # here, because --help needs no package

    try:
        value = orjson.loads(line)
    except ValueError:
        try:
            value = parse_json(line)  # slower, but also accepts NaN
        except ValueError:  # also for bytes that are not UTF-8
            return None
    return value if isinstance(value, dict) else None
