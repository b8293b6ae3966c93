"""Notes the signals by which people and schedulers ask a rank to stop. Standard library only."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from verl_ext.errors import STOP_SIGNALS

SAME_REQUEST_S = 1.0
"""Signals this close together are one request: a scheduler signals every process, and the launcher forwards as well."""


class RankSignals:
    """What this rank was asked, once it has something to save.

    Attributes:
        received: the first signal, None when there was none.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._time = 0.0

    def hold(self) -> None:
        """From now on the first signal is noted, and only a second one ends the process.

        A thread listens, since Python runs a handler only between two instructions of the main thread: by then a
        signal that came during a long collective or backward pass would seem to have come later than it did, and a
        second one would not end the process at once. A signal that whoever started us ignores (nohup) stays ignored.
        """
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reading,), name="signals", daemon=True).start()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, left_to_the_thread)

    def _listen(self, reading: int) -> None:
        while numbers := os.read(reading, 64):
            for number in numbers:
                if number in STOP_SIGNALS:  # others have handlers too, such as a loader's for its workers
                    self._note(signal.Signals(number))

    def _note(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._time = number, now
        elif now - self._time > SAME_REQUEST_S:
            os._exit(128 + number)


def left_to_the_thread(number: int, frame: FrameType | None) -> None:
    """The kernel tells the pipe; without a handler it would end the process instead."""


def end_at_once() -> None:
    """Before `hold` there is nothing to save, and the kernel ends the process at the first signal."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own raises KeyboardInterrupt


def ignore_stop_signals(worker: int) -> None:
    """For a worker of a data loader, whatever its number: it must live until its rank has saved, and ends with it."""
    signal.set_wakeup_fd(-1)  # the pipe is the rank's
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
