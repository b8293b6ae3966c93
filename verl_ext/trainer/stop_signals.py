"""Notes the signals by which people and schedulers ask a rank to stop. Standard library only."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from verl_ext.errors import STOP_SIGNALS, STOPPED_EXIT_CODE

SAME_REQUEST_S = 1.0
"""Signals this close together are one request: a scheduler signals every process, and the launcher forwards as well."""


class StopSignals:
    """What this process was asked; before `hold` there is nothing to save, and a signal ends it at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._time = 0.0
        self._holding = False

    def install(self) -> None:
        """Begin to listen; a signal that whoever started us ignores (nohup) stays ignored."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def hold(self) -> None:
        """From now on the first signal is noted, and only a second one ends the process."""
        self._holding = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._holding:
            os._exit(STOPPED_EXIT_CODE)
        if self.received is None:
            self.received, self._time = signal.Signals(number), now
        elif now - self._time > SAME_REQUEST_S:
            os._exit(128 + number)


def ignore_stop_signals(worker: int) -> None:
    """For a worker of a data loader, whatever its number: it must live until its rank has saved, and ends with it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
