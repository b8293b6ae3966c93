"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class StepTimer:
    """Adds up wall-clock seconds by part of the step."""

    def __init__(
        self,
        *,
        synchronize: torch.device | str | None = None,
        on_part: Callable[[str, float, float], None] | None = None,
    ) -> None:
        """Start with no part measured.

        Args:
            synchronize: a CUDA device to wait for at both ends of every part, so that its kernels count in the part
                that launched them; None, the default, waits for nothing and costs nothing.
            on_part: told the name, start and end of every part, by `time.perf_counter`.
        """
        self._device = synchronize
        self._on_part = on_part
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the seconds spent inside the `with` block to `part`, also when the block raises."""
        start = self._now()
        try:
            yield
        finally:
            end = self._now()
            self._seconds[part] += end - start
            if self._on_part is not None:
                self._on_part(part, start, end)

    def pop(self) -> dict[str, float]:
        """Return the seconds by part since the last call, and start again from zero."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def _now(self) -> float:
        if self._device is not None:
            import torch

            torch.cuda.synchronize(self._device)
        return time.perf_counter()
