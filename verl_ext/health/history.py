"""Metrics of a run by step and by epoch, for the rules, in memory that does not grow with the run."""

from __future__ import annotations

import copy
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.health.trend import Array
from verl_ext.metrics.jsonl import KEY_COLUMNS, METRICS_FILE, is_number, iter_metrics

MAX_RECENT = 256
"""Number of latest values to keep."""
MAX_FIRST = 20
"""Number of values to keep from the start of the run."""
MAX_SEGMENTS = 256
SEGMENT_VALUES = 10
"""Initial number of values per segment; doubles when there are too many segments."""
MAX_EPOCHS = 256
MAX_BUFFERED = 4096
"""Number of rows that are added together, because NumPy takes about as long for one value as for a thousand."""
MAX_VALUE = 1e30
"""Larger absolute values count as infinite; sums of their squares would overflow."""
EPOCH = "train/epoch"
Columns = dict[str, tuple[NDArray[np.int64], Array]]
"""Indices of the rows that have a metric, and its values, by metric."""
NO_COLUMN = np.empty(0, np.int64), np.empty(0)


class MetricSeries:
    """One metric: its first values, its latest values, and means over equal segments of the run.

    Non-finite values are only counted.
    """

    def __init__(self) -> None:
        self.num_points = 0
        self.nonfinite_streak = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=MAX_RECENT)
        self._is_finite: deque[bool] = deque(maxlen=MAX_RECENT)
        self._first: list[float] = []
        self._segments: list[float] = []
        self._size, self._sum, self._count = SEGMENT_VALUES, 0.0, 0

    def add(self, steps: NDArray[np.int64], values: Array) -> None:
        """Add values; both arrays are (values,), and steps must not decrease."""
        is_finite = np.isfinite(values)
        self._is_finite.extend(is_finite[-MAX_RECENT:].tolist())
        [finite] = is_finite.nonzero()
        if not len(finite):
            self.nonfinite_streak += len(values)
            return
        self.nonfinite_streak = len(values) - 1 - int(finite[-1])
        steps, values = steps[finite], values[finite]
        self.num_points += len(values)
        self._recent.extend(zip(steps[-MAX_RECENT:].tolist(), values[-MAX_RECENT:].tolist()))
        self._first.extend(values[: MAX_FIRST - len(self._first)].tolist())
        self._add_to_segments(values)

    def _add_to_segments(self, values: Array) -> None:
        segment_of = np.arange(self._count, self._count + len(values)) // self._size
        num_whole, self._count = divmod(self._count + len(values), self._size)
        sums = np.bincount(segment_of, values, num_whole + 1)
        sums[0] += self._sum
        *whole, self._sum = sums.tolist()
        self._segments += [total / self._size for total in whole]
        while len(self._segments) >= MAX_SEGMENTS:  # merge neighbors
            if len(self._segments) % 2:
                self._sum += self._segments.pop() * self._size
                self._count += self._size
            self._segments = [(a + b) / 2 for a, b in zip(self._segments[::2], self._segments[1::2])]
            self._size *= 2

    @property
    def first(self) -> Array:
        """The first values of the run, up to `MAX_FIRST`."""
        return np.array(self._first)

    @property
    def segment_means(self) -> Array:
        """Means over equal segments of the run, without values of an incomplete segment."""
        return np.array(self._segments)

    @property
    def last_value(self) -> float:
        """The last finite value; NaN if there is none."""
        return self._recent[-1][1] if self._recent else math.nan

    def recent(self, count: int = MAX_RECENT) -> Array:
        """The last finite values, at most `count`."""
        return np.array([value for _, value in self.points(count)])

    def points(self, count: int = MAX_RECENT) -> list[tuple[int, float]]:
        """Step and value of the last finite values, at most `count`."""
        return list(self._recent)[-count:]

    def num_nonfinite(self, count: int) -> int:
        """Number of non-finite values among the last `count`."""
        return list(self._is_finite)[-count:].count(False)


class MetricHistory:
    """Every metric of a run; rows are added in order, without those that a later attempt replaced.

    Attributes:
        step: the last step.
        time: time of the last row, in seconds since 1970.
        steps_per_epoch: number of steps per epoch; None before the run has logged `train/epoch`.
    """

    def __init__(self) -> None:
        self.step, self.time = 0, 0.0
        self.steps_per_epoch: int | None = None
        self._rows: list[tuple[int, Mapping[str, float]]] = []  # step and metrics, not in the series yet
        self._series: dict[str, MetricSeries] = defaultdict(MetricSeries)
        self._epoch = math.inf  # so that the first row starts no new epoch
        self._sums: dict[str, tuple[float, int]] = {}  # sum and number of values of the current epoch
        self._epochs: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_EPOCHS))
        self._num_epochs: dict[str, int] = defaultdict(int)

    def add(self, step: int, metrics: Mapping[str, float], time: float = 0.0) -> None:
        """Add a row that was logged at `time`, in seconds since 1970."""
        self.step, self.time = max(step, self.step), time
        epoch = metrics.get(EPOCH, math.nan)
        if math.isfinite(epoch) and epoch > 1e-9:  # a damaged file can contain any number
            self.steps_per_epoch = round(step / epoch)
        self._rows.append((step, dict(metrics)))
        if len(self._rows) == MAX_BUFFERED:
            self._flush()

    def series(self, name: str) -> MetricSeries:
        """A metric; empty if it was never logged."""
        self._flush()
        return self._series[name] if name in self._series else MetricSeries()

    def epochs(self, name: str) -> Array:
        """Means of a metric over the last complete epochs, the oldest first."""
        self._flush()
        return np.array(self._epochs[name]) if name in self._epochs else np.empty(0)

    def num_epochs(self, name: str) -> int:
        """Number of complete epochs in which a metric was logged, including those whose means are no longer kept."""
        self._flush()
        return self._num_epochs.get(name, 0)

    def _flush(self) -> None:
        """Add the buffered rows to the series and to the epochs."""
        if not self._rows:
            return
        steps, rows = zip(*self._rows)
        self._rows, all_steps = [], np.array(steps)
        columns = {name: column for name, column in columns_of(rows).items() if name not in KEY_COLUMNS}
        for name, (places, values) in columns.items():
            self._series[name].add(all_steps[places], values)
        if EPOCH in columns:
            self._add_to_epochs(columns, len(rows))

    def _add_to_epochs(self, columns: Columns, num_rows: int) -> None:
        """Add the rows that have an epoch to its sums, and keep the means of completed epochs."""
        places, epochs = columns[EPOCH]
        places, epochs = places[np.isfinite(epochs)], epochs[np.isfinite(epochs)]
        if not len(places):
            return
        numbers = np.ceil(epochs - 1e-9)
        is_last = np.abs(epochs - np.round(epochs)) < 1e-9
        is_first = np.append(False, is_last[:-1]) | (numbers > np.append(self._epoch, numbers[:-1]))
        parts = np.full(num_rows, -1)  # by row: number of its epoch; 0 is the current one
        parts[places] = np.cumsum(is_first)
        num_over = int(parts[places[-1]]) + int(is_last[-1])
        for name in {**columns, **self._sums}:
            rows, values = columns.get(name, NO_COLUMN)
            epoch_of = parts[rows]
            is_counted = (epoch_of >= 0) & np.isfinite(values)
            epoch_of, values = epoch_of[is_counted], values[is_counted]
            counts = np.bincount(epoch_of, minlength=num_over + 1)
            sums = np.bincount(epoch_of, values, num_over + 1).astype(float)  # bincount of no values returns integers
            total, count = self._sums.get(name, (0.0, 0))
            sums[0], counts[0] = sums[0] + total, counts[0] + count
            self._sums[name] = float(sums[num_over]), int(counts[num_over])
            if num_over:
                is_logged = counts[:num_over] > 0
                means = sums[:num_over][is_logged] / counts[:num_over][is_logged]
                self._epochs[name].extend(means[-MAX_EPOCHS:].tolist())
                self._num_epochs[name] += len(means)
        self._epoch = float(numbers[-1])


def rewinds(attempts: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return the step from which each attempt resumed, by its number; it discarded all later steps before it.

    An attempt that completed no step discarded nothing, because the next one may resume from a later step; only the
    newest may still complete some.
    """
    found: dict[int, int] = {}
    for each in attempts:
        first, last = each.get("first_step"), each.get("last_step", math.inf)
        has_steps = each is attempts[-1] or (last is not None and last > (first or 0))
        if first is not None and has_steps:
            found[each["attempt"]] = first
    return found


def effective_rows(rows: Iterator[dict[str, Any]], attempts: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows of `metrics.jsonl` or `events.jsonl`, without steps that a later attempt in `run.json` discarded."""
    rewound_to = rewinds(attempts)
    last_steps: dict[int, float] = {}  # by attempt: last step that no later attempt discarded
    for row in rows:
        attempt = row["attempt"]
        if attempt not in last_steps:
            later = (step for number, step in rewound_to.items() if number > attempt)
            last_steps[attempt] = min(later, default=math.inf)
        if row["step"] <= last_steps[attempt]:
            yield row


def read_history(
    run_dir: Path, attempts: Sequence[Mapping[str, Any]], until: int | None = None, snapshot_at: int | None = None
) -> tuple[MetricHistory, MetricHistory]:
    """Read the history of a run from `metrics.jsonl`, which may not exist yet.

    Args:
        attempts: attempts from `run.json`.
        until: last step to read; None reads all.
        snapshot_at: step at which to copy the history.

    Returns:
        The history, and its copy at the step of the snapshot; the history itself if the run is not past that step.

    Raises:
        UserError: the file cannot be read.
    """
    history, path = MetricHistory(), run_dir / METRICS_FILE
    snapshot: MetricHistory | None = None
    last = max((each["attempt"] for each in attempts), default=None)
    for row in effective_rows(iter_metrics(path), attempts) if path.is_file() else ():
        if until is not None and row["step"] > until:
            if row["attempt"] == last:  # no row to read follows
                break
            continue
        if snapshot is None and snapshot_at is not None and row["step"] > snapshot_at:
            snapshot = copy.deepcopy(history)
        history.add(row["step"], row, row["time"])
    return history, snapshot or history


# Rows to columns


def columns_of(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Group the values of some rows by metric; skip others than numbers. Beyond `MAX_VALUE`, they are infinite."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):  # rows with the same metrics become columns together
        groups[tuple(row)].append(place)
    parts: dict[str, list[tuple[NDArray[np.int64], Array]]] = defaultdict(list)
    for names, members in groups.items():
        places = np.array(members)
        columns = zip(*(rows[place].values() for place in members)) if names else ()
        for name, values in zip(names, columns):
            numbers = _as_numbers(values)
            if numbers is None:
                kept = [index for index, value in enumerate(values) if is_number(value)]
                parts[name].append((places[kept], _limited(np.array([values[index] for index in kept], np.float64))))
            else:
                parts[name].append((places, _limited(numbers)))
    return {name: joined for name, found in parts.items() if len((joined := _in_order(found))[0])}


def _as_numbers(values: Sequence[Any]) -> Array | None:
    try:
        numbers = np.array(values, np.float64)  # also "NaN" and "Infinity", as the file spells them
    except (TypeError, ValueError, OverflowError):
        return None
    return numbers if numbers.ndim == 1 else None  # lists of equal lengths become a matrix


def _in_order(parts: Sequence[tuple[NDArray[np.int64], Array]]) -> tuple[NDArray[np.int64], Array]:
    if len(parts) == 1:
        return parts[0]
    places, values = (np.concatenate(each) for each in zip(*parts))
    order = np.argsort(places, kind="stable")
    return places[order], values[order]


def _limited(values: Array) -> Array:
    is_huge = np.abs(values) > MAX_VALUE  # False for NaN
    return np.where(is_huge, np.copysign(np.inf, values), values) if is_huge.any() else values
