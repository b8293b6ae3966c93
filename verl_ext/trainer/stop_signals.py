"""Notes the signals by which people and schedulers ask a rank to stop. Standard library only."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from verl_ext.errors import STOP_SIGNALS

SAME_REQUEST_S = 1.0
"""Signals this close together are one request: a scheduler signals every process, and the launcher forwards as well."""


class StopSignals:
    """What this process was asked, once it has something to save.

    Attributes:
        received: the signal, None when there was none.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._time = 0.0

    def hold(self) -> None:
        """From now on the first signal is noted, and only a second one ends the process.

        A signal that whoever started us ignores (nohup) stays ignored.
        """
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._time = signal.Signals(number), now
        elif now - self._time > SAME_REQUEST_S:
            os._exit(128 + number)


def end_at_once() -> None:
    """Before `hold` there is nothing to save, and the kernel ends the process at the first signal.

    A handler of ours would not do: Python runs it only between two instructions, and a rank that waits in a collective
    for one that has left does not come to the next.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own raises KeyboardInterrupt


def ignore_stop_signals(worker: int) -> None:
    """For a worker of a data loader, whatever its number: it must live until its rank has saved, and ends with it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
