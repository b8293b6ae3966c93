"""Notes the signals by which people and schedulers ask a rank to stop. Standard library only."""

from __future__ import annotations

import signal
from types import FrameType

from verl_ext.errors import STOP_SIGNALS


class RankSignals:
    """What this rank was asked, once it has something to save.

    However often a rank is signalled, it saves at the next step boundary: only the launcher decides to stop sooner.

    Attributes:
        received: the first signal, None when there was none.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def hold(self) -> None:
        """From now on a signal is noted and does not end the process; one that is ignored (nohup) stays ignored."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)


def end_at_once() -> None:
    """Before `hold` there is nothing to save, and the kernel ends the process at the first signal."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own raises KeyboardInterrupt


def ignore_stop_signals(worker: int) -> None:
    """For a worker of a data loader, whatever its number: it must live until its rank has saved, and ends with it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
