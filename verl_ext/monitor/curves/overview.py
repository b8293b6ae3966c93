"""A curve of any length in few enough points to draw, with its peaks, in memory that does not grow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_POINTS = 4000
"""Drawn of a curve."""
Array = NDArray[np.float64]


class Overview:
    """Keeps the points while there are few; then the least and the greatest value of equal parts of them.

    Args:
        most: points at most; even.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most, self._size = most, 1  # points in a part
        # by part: x and value of its least and its greatest point, the sum of its finite values, and their number
        self._parts = np.empty((0, 6))
        self._open: Array = np.empty((0, 2))
        self.num_points = 0
        self.last: tuple[float, float] | None = None

    def add(self, x: Array, values: Array) -> None:
        """Add points, both (points,); values that are not finite are counted and not drawn."""
        self.num_points += len(values)
        finite = np.isfinite(values)
        points = np.column_stack([x[finite], values[finite]]).astype(np.float64)
        if len(points):
            self.last = (float(points[-1, 0]), float(points[-1, 1]))
        self._open = np.concatenate([self._open, points])
        self._close()
        while len(self._parts) + len(self._open) / self._size > (
            self._most if self._size == 1 else self._most // 2 - 1
        ):
            self._coarsen()

    def points(self) -> tuple[Array, Array]:
        """What is drawn, at most `most` points: x and values, in their order."""
        if self._size == 1:
            return self._parts[:, 0], self._parts[:, 1]
        parts = self._all()
        least, greatest = parts[:, 0:2], parts[:, 2:4]
        first = least[:, 0] <= greatest[:, 0]
        both = np.stack([np.where(first[:, None], least, greatest), np.where(first[:, None], greatest, least)], axis=1)
        both = both.reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def means(self) -> tuple[Array, Array]:
        """The same curve without its peaks, for smoothing: the mean of each part, in its middle."""
        if self._size == 1:
            return self.points()
        parts = self._all()
        return (parts[:, 0] + parts[:, 2]) / 2, parts[:, 4] / parts[:, 5]

    def _all(self) -> Array:
        return np.concatenate([self._parts, _parts_of(self._open[None])]) if len(self._open) else self._parts

    def _close(self) -> None:
        """Make parts of what is open, as far as it fills them."""
        count = len(self._open) // self._size
        if count:
            whole = self._open[: count * self._size].reshape(count, self._size, 2)
            self._parts = np.concatenate([self._parts, _parts_of(whole)])
            self._open = self._open[count * self._size :]

    def _coarsen(self) -> None:
        """Parts of twice as many points; one that is left over is opened again as its two points."""
        parts, rest = self._parts, None
        if len(parts) % 2:
            parts, rest = parts[:-1], parts[-1]
        pairs = parts.reshape(-1, 2, 6)
        self._size *= 2
        if rest is not None:
            ends = np.array([rest[0:2], rest[2:4]]) if self._size > 2 else rest[None, 0:2]
            self._open = np.concatenate([ends[np.argsort(ends[:, 0], kind="stable")], self._open])
        least = np.where((pairs[:, 0, 1] <= pairs[:, 1, 1])[:, None], pairs[:, 0, 0:2], pairs[:, 1, 0:2])
        greatest = np.where((pairs[:, 0, 3] >= pairs[:, 1, 3])[:, None], pairs[:, 0, 2:4], pairs[:, 1, 2:4])
        self._parts = np.concatenate([least, greatest, pairs[:, :, 4:6].sum(1)], axis=1)
        self._close()


def _parts_of(points: Array) -> Array:
    """(parts, points of each, 2) to (parts, 6)."""
    places = np.arange(len(points))
    least, greatest = points[places, points[:, :, 1].argmin(1)], points[places, points[:, :, 1].argmax(1)]
    count = np.full((len(points), 1), float(points.shape[1]))
    return np.concatenate([least, greatest, points[:, :, 1].sum(1, keepdims=True), count], axis=1)
