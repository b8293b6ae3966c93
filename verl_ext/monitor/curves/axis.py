"""One axis over all attempts of a run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


class CumulativeAxis:
    """Steps counted over restarts: each attempt goes on where the one before ended, whatever its steps are called.

    An attempt that begins at the checkpoint of step 20 after one that had reached step 30 does steps 21 to 30 again;
    on this axis it begins at 30, so that both are seen. Where an attempt lost no step the axis is that of the steps.

    Args:
        first_steps: step that each attempt began from, where that is known.
    """

    def __init__(self, first_steps: Mapping[int, int]) -> None:
        self.first_steps = first_steps
        self._offsets: dict[int, int] = {}
        self._end: int | None = None

    def learn(self, attempt: int, lowest: int, highest: int) -> None:
        """Rows of an attempt came, in their order; a new attempt begins where the axis ends."""
        if attempt not in self._offsets:
            first = self.first_steps.get(attempt, max(0, lowest - 1))
            self._offsets[attempt] = 0 if self._end is None else self._end - first
        self._end = max(highest + self._offsets[attempt], self._end or 0)

    def at(self, attempts: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Where points of attempts that were learnt lie; both (points,)."""
        placed = steps.astype(np.float64)
        for attempt in np.unique(attempts).tolist():
            placed[attempts == attempt] += self._offsets[attempt]
        return placed

    @property
    def starts(self) -> dict[int, int]:
        """Where each attempt begins."""
        return {each: offset + self.first_steps.get(each, 0) for each, offset in self._offsets.items()}

    def shift_of(self, attempt: int) -> int:
        """How far an attempt's steps are moved."""
        return self._offsets.get(attempt, 0)
