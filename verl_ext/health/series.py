"""One metric of a run, in memory that does not grow with the run."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

MOST_RECENT = 256
"""Points that are kept as they are."""
MOST_FIRST = 20
"""Points of the run's beginning that are kept."""
MOST_BUCKETS = 256
"""Means that stand for the whole run."""
FIRST_BUCKET = 10
"""Points in a bucket, until there are too many."""

Array = NDArray[np.float64]


class Series:
    """The first points, the last ones, and means over equal parts of all of them; non-finite values count nowhere."""

    def __init__(self) -> None:
        self.num_points = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=MOST_RECENT)
        self._first: list[float] = []
        self._buckets: list[float] = []
        self._size, self._sum, self._count = FIRST_BUCKET, 0.0, 0

    def add(self, step: int, value: float) -> None:
        """Add a point; steps must not fall."""
        self.num_points += 1
        self._recent.append((step, value))
        if len(self._first) < MOST_FIRST:
            self._first.append(value)
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self._size:
            self._buckets.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self._buckets) == MOST_BUCKETS:  # two become one, each of twice as many points
            self._buckets = [(a + b) / 2 for a, b in zip(self._buckets[::2], self._buckets[1::2])]
            self._size *= 2

    @property
    def first(self) -> Array:
        """The run's first values, up to `MOST_FIRST`."""
        return np.array(self._first)

    @property
    def buckets(self) -> Array:
        """Means over equal parts of the run, but for what has not filled a part yet."""
        return np.array(self._buckets)

    @property
    def last_step(self) -> int:
        """Of the last point; 0 before the first."""
        return self._recent[-1][0] if self._recent else 0

    @property
    def last_value(self) -> float:
        """Of the last point; NaN before the first."""
        return self._recent[-1][1] if self._recent else float("nan")

    def recent(self, count: int = MOST_RECENT) -> Array:
        """The last values, at most `count` of them."""
        return np.array([value for _, value in self.points(count)])

    def points(self, count: int = MOST_RECENT) -> list[tuple[int, float]]:
        """The last points, at most `count` of them: step and value."""
        if count >= len(self._recent):
            return list(self._recent)
        return [self._recent[place] for place in range(len(self._recent) - count, len(self._recent))]
