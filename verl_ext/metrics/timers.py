"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class StepTimer:
    """Adds up seconds by part of the step.

    On a GPU the seconds are those of its own clock, between the kernels that were launched before and in the part: no
    part is waited for until they are asked for.
    """

    def __init__(self, *, on_gpu: bool = False, on_part: Callable[[str, float, float], None] | None = None) -> None:
        """Start with no part measured.

        Args:
            on_gpu: whether the work is launched on the current CUDA device; False, the default, takes this process's
                clock.
            on_part: told the name, start and end of every part, by `time.perf_counter`; with it every part waits for
                the GPU at both ends, so that they are where its kernels ran.
        """
        self._on_gpu, self._on_part = on_gpu, on_part
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._launched: list[tuple[str, Any, Any]] = []

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the seconds spent inside the `with` block to `part`, also when the block raises."""
        measured = self._by_events if self._on_gpu and self._on_part is None else self._by_clock
        with measured(part):
            yield

    def pop(self) -> dict[str, float]:
        """Return the seconds by part since the last call, and start again from zero."""
        for part, start, end in self._launched:
            end.synchronize()
            self._seconds[part] += start.elapsed_time(end) / 1e3  # it is given in milliseconds
        seconds = dict(self._seconds)
        self._seconds.clear()
        self._launched.clear()
        return seconds

    @contextmanager
    def _by_clock(self, part: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            end = self._now()
            self._seconds[part] += end - start
            if self._on_part is not None:
                self._on_part(part, start, end)

    @contextmanager
    def _by_events(self, part: str) -> Iterator[None]:
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        try:
            yield
        finally:
            end.record()
            self._launched.append((part, start, end))

    def _now(self) -> float:
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()
