"""What the rules see of a run: every metric by step and by epoch, in memory that does not grow with the run."""

from __future__ import annotations

import copy
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.health.trend import Array
from verl_ext.metrics.jsonl import KEY_COLUMNS, METRICS_FILE, iter_metrics

MAX_RECENT = 256
"""Latest values that are kept as they are."""
MAX_FIRST = 20
"""Values of the start of the run that are kept."""
MAX_SEGMENTS = 256
SEGMENT_VALUES = 10
"""Values in a segment, until there are too many segments."""
MAX_EPOCHS = 256
EPOCH = "train/epoch"


class MetricSeries:
    """One metric: its first values, its latest values, and means over equal segments of the run.

    Values that are not finite are counted and kept nowhere else.
    """

    def __init__(self) -> None:
        self.num_points = 0
        self.nonfinite_streak = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=MAX_RECENT)
        self._is_finite: deque[bool] = deque(maxlen=MAX_RECENT)
        self._first: list[float] = []
        self._segments: list[float] = []
        self._size, self._sum, self._count = SEGMENT_VALUES, 0.0, 0

    def add(self, step: int, value: float) -> None:
        """Add a value; steps must not fall."""
        is_finite = math.isfinite(value)
        self._is_finite.append(is_finite)
        self.nonfinite_streak = 0 if is_finite else self.nonfinite_streak + 1
        if not is_finite:
            return
        self.num_points += 1
        self._recent.append((step, value))
        if len(self._first) < MAX_FIRST:
            self._first.append(value)
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self._size:
            self._segments.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self._segments) == MAX_SEGMENTS:  # merge neighbors
            self._segments = [(a + b) / 2 for a, b in zip(self._segments[::2], self._segments[1::2])]
            self._size *= 2

    @property
    def first(self) -> Array:
        """The first values of the run, up to `MAX_FIRST`."""
        return np.array(self._first)

    @property
    def segment_means(self) -> Array:
        """Means over equal segments of the run, without the values that have not filled one yet."""
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
        """How many of the last `count` values were not finite."""
        return list(self._is_finite)[-count:].count(False)


class MetricHistory:
    """Every metric of a run; rows are added in their order, without those that a later attempt replaced.

    Attributes:
        step: the last step.
        time: when the last row was logged, in seconds since 1970.
        steps_per_epoch: None before the run has logged `train/epoch`.
    """

    def __init__(self) -> None:
        self.step, self.time = 0, 0.0
        self.steps_per_epoch: int | None = None
        self._series: dict[str, MetricSeries] = defaultdict(MetricSeries)
        self._epoch: int | None = None
        self._sums: dict[str, tuple[float, int]] = {}
        self._epochs: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_EPOCHS))
        self._num_epochs: dict[str, int] = defaultdict(int)

    def add(self, step: int, metrics: Mapping[str, float], time: float = 0.0) -> None:
        """Add a row that was logged at `time`, in seconds since 1970."""
        self.step, self.time = max(step, self.step), time
        epoch = metrics.get(EPOCH)
        if epoch is not None and not math.isfinite(epoch):  # a damaged file can have any number
            epoch = None
        if epoch is not None:
            self._enter_epoch(math.ceil(epoch - 1e-9))
            self.steps_per_epoch = round(step / epoch) if epoch > 1e-9 else self.steps_per_epoch
        for name, value in metrics.items():
            if name in KEY_COLUMNS:
                continue
            self._series[name].add(step, value)
            if epoch is not None and math.isfinite(value):
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, count + 1
        if epoch is not None and abs(epoch - round(epoch)) < 1e-9:
            self._close_epoch()

    def series(self, name: str) -> MetricSeries:
        """A metric; empty if it was never logged."""
        return self._series[name] if name in self._series else MetricSeries()

    def epochs(self, name: str) -> Array:
        """Means of a metric over the last complete epochs, the oldest first."""
        return np.array(self._epochs[name]) if name in self._epochs else np.empty(0)

    def num_epochs(self, name: str) -> int:
        """Complete epochs in which a metric was logged, including those whose means are no longer kept."""
        return self._num_epochs.get(name, 0)

    def _enter_epoch(self, epoch: int) -> None:
        if self._epoch is not None and epoch > self._epoch:
            self._close_epoch()
        self._epoch = epoch

    def _close_epoch(self) -> None:
        for name, (total, count) in self._sums.items():
            self._epochs[name].append(total / count)
            self._num_epochs[name] += 1
        self._sums = {}


def effective_rows(rows: Iterator[dict[str, Any]], attempts: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of `metrics.jsonl`, without those of steps that a later one of the attempts in `run.json` repeated."""
    first_steps = {each["attempt"]: each.get("first_step") for each in attempts}
    for row in rows:
        later = (first for number, first in first_steps.items() if number > row["attempt"] and first is not None)
        if row["step"] <= min(later, default=row["step"]):
            yield row


def read_history(
    run_dir: Path, attempts: Sequence[Mapping[str, Any]], until: int | None = None, snapshot_at: int | None = None
) -> tuple[MetricHistory, MetricHistory]:
    """Read the history of a run from `metrics.jsonl`, which may not exist yet.

    Args:
        attempts: of `run.json`.
        until: last step to read; None reads all.
        snapshot_at: step at which a copy is made.

    Returns:
        The history, and what it was at the step of the snapshot; the history itself if the run is not beyond that step.

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
        metrics = {name: float(value) for name, value in row.items() if name not in KEY_COLUMNS}
        history.add(row["step"], metrics, row["time"])
    return history, snapshot or history
