"""Tells when something else has the processor while a latency is measured."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")

DISTURBED = 1.15
"""Times its usual duration that the canary's work takes when the processor is not all ours."""
MOST_TRIES = 4
"""Measurements of one run."""
REMEMBERED = 200
"""Durations by which the usual one is known: its lower quartile."""
WORK = (64, 512, 6)
"""Rows, columns and number of the matrix products that the canary makes; about 0.6 ms."""


class Canary:
    """A small piece of work, always the same, that is timed before and after each run on a CPU.

    A virtual machine shares its host with others. Where they take the processor for some hundredths or tenths of a
    second, whatever runs then seems half as quick, whichever method chose it. A run between two canaries of which one
    was slow is measured again; its result, which is the same each time, plays no part in that.

    Args:
        is_wanted: False measures everything once, as on a GPU, whose clock does not count what the host does.
        clock: seconds; another one in tests.
    """

    def __init__(self, is_wanted: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._is_wanted, self._clock = is_wanted, clock
        rows, columns, self._products = WORK
        self._left, self._right = torch.zeros(rows, columns), torch.zeros(columns, columns)
        self._durations: deque[float] = deque(maxlen=REMEMBERED)
        self.num_runs = self.num_again = 0

    def calm(self, run: Callable[[], T]) -> T:
        """Run, and again while that was disturbed; the last result where it always was."""
        self.num_runs += 1
        if not self._is_wanted:
            return run()
        for tries in range(MOST_TRIES):
            self.num_again += tries > 0
            before = self._duration()
            found = run()
            if max(before, self._duration()) <= DISTURBED * float(np.quantile(self._durations, 0.25)):
                break
        return found

    @property
    def share_again(self) -> float:
        """Measurements that were made again, over the runs."""
        return self.num_again / max(1, self.num_runs)

    @torch.inference_mode()
    def _duration(self) -> float:
        begun = self._clock()
        for _ in range(self._products):
            torch.mm(self._left, self._right)
        self._durations.append(self._clock() - begun)
        return self._durations[-1]
