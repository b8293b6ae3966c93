"""What the rules see of a run: its metrics by step and by epoch."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping

import numpy as np

from verl_ext.health.series import Array, Series

MOST_EPOCHS = 256
"""Epochs whose means are kept."""
EPOCH = "train/epoch"
NONFINITE = frozenset({"train/grad_norm", "val/loss"})
"""Metrics of which it is kept whether they were finite."""
MOST_FINITE = 256
"""Values of each of which it is kept."""
_NOT_METRICS = ("step", "attempt", "time")


class History:
    """Takes a run's rows in their order, those that a later attempt overtook left out.

    Args:
        names: of the metrics that are kept; None for all.
    """

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self._names = names
        self._series: dict[str, Series] = defaultdict(Series)
        self._epoch: int | None = None
        self._sums: dict[str, tuple[float, int]] = {}
        self._epochs: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MOST_EPOCHS))
        self.step, self.time = 0, 0.0
        self.nonfinite_streak = 0
        self._finite: dict[str, deque[bool]] = defaultdict(lambda: deque(maxlen=MOST_FINITE))

    def add(self, step: int, metrics: Mapping[str, float], time: float = 0.0) -> None:
        """Take a row.

        Args:
            step: optimizer steps since the run began.
            metrics: value by name; non-finite values are counted, and kept nowhere.
            time: when it was logged, seconds since 1970.
        """
        self.step, self.time = max(step, self.step), time
        if (loss := metrics.get("train/loss")) is not None:
            self.nonfinite_streak = 0 if math.isfinite(loss) else self.nonfinite_streak + 1
        if EPOCH in metrics:
            self._turn_to_epoch(math.ceil(metrics[EPOCH] - 1e-9))
        for name in NONFINITE & metrics.keys():
            self._finite[name].append(math.isfinite(metrics[name]))
        for name, value in metrics.items():
            if name not in _NOT_METRICS and (self._names is None or name in self._names) and math.isfinite(value):
                self._series[name].add(step, value)
                if EPOCH in metrics:
                    total, count = self._sums.get(name, (0.0, 0))
                    self._sums[name] = total + value, count + 1
        if EPOCH in metrics and abs(metrics[EPOCH] - round(metrics[EPOCH])) < 1e-9:
            self._close_epoch()

    def series(self, name: str) -> Series:
        """A metric; without a point where it was never logged."""
        return self._series[name] if name in self._series else Series()

    def num_nonfinite(self, name: str, count: int) -> int:
        """How many of the last values of one of `NONFINITE` were no finite numbers."""
        return list(self._finite[name])[-count:].count(False) if name in self._finite else 0

    def epochs(self, name: str) -> Array:
        """Means of a metric over the last whole epochs, the oldest first."""
        return np.array(self._epochs[name]) if name in self._epochs else np.empty(0)

    def _turn_to_epoch(self, epoch: int) -> None:
        if self._epoch is not None and epoch > self._epoch:
            self._close_epoch()
        self._epoch = epoch

    def _close_epoch(self) -> None:
        for name, (total, count) in self._sums.items():
            self._epochs[name].append(total / count)
        self._sums = {}
