"""Where the seconds go from a command to its first training step, over all the processes on the way.

One clock, `time.perf_counter`, serves every process of a machine. Each part begins where the one before it ended, so
that the parts add up to the whole and nothing is left out.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from verl_ext.processes import start_ticks

PARTS_FILE = "startup.json"
"""What the launcher leaves for its ranks, beside their configuration."""


class Startup:
    """The parts of one start so far. Does nothing until it has begun, as in a trainer that no command started."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last: float | None = None

    def begin(self, moment: float) -> None:
        """Start to count at a moment of `time.perf_counter`, from nothing."""
        self._seconds, self._last = {}, moment

    def mark(self, part: str, moment: float | None = None) -> None:
        """What has passed since the last mark belongs to a part, on top of what it has.

        Args:
            part: its name.
            moment: when it ended, by `time.perf_counter`; None is now.
        """
        if self._last is None:
            return
        moment = time.perf_counter() if moment is None else moment
        self._seconds[part] = self._seconds.get(part, 0.0) + moment - self._last
        self._last = moment

    def take(self) -> dict[str, float]:
        """End it, and return the seconds of each part and of `total`; empty where it had not begun."""
        seconds, self._seconds, self._last = self._seconds, {}, None
        return {**seconds, "total": sum(seconds.values())} if seconds else {}

    def hand_on(self, directory: Path) -> None:
        """End it here; a process that is given the directory goes on with it."""
        (directory / PARTS_FILE).write_text(json.dumps({"last": self._last, "seconds": self._seconds}))
        self.take()

    def go_on(self, directory: Path) -> None:
        """Take over from where `hand_on` left; nothing is counted where it left nothing."""
        path = directory / PARTS_FILE
        if path.exists():
            left = json.loads(path.read_text())
            self._seconds, self._last = left["seconds"], left["last"]


startup = Startup()
"""Of this process."""


def process_start() -> float:
    """When the kernel made this process, by `time.perf_counter`; to a hundredth of a second."""
    ticks = start_ticks(os.getpid())
    assert ticks is not None  # this process runs
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")  # sleep included, as in the ticks
    return time.perf_counter() - age
