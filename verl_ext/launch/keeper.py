"""Passes on to the ranks what the launcher is asked, and holds them to the time they have for it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from dataclasses import replace

import psutil

from verl_ext.console import print_line
from verl_ext.launch.outcome import Request
from verl_ext.processes import StopSignals

POLL_S = 0.1
LEAVE_AFTER_S = 10.0
"""How long torchrun may take to notice that the ranks are gone; it may also wait for nodes that never come."""


class Keeper:
    """Waits for the thread that runs the ranks of this node.

    Args:
        module: what the ranks run, by which they are told from other children.
        signals: what the launcher is asked.
        grace_s: seconds that the ranks have to save.

    Attributes:
        request: what was asked and done, None when nothing was.
    """

    def __init__(self, module: str, signals: StopSignals, grace_s: float) -> None:
        self.request: Request | None = None
        self._module, self._signals, self._grace_s = module, signals, grace_s
        self._asked: set[int] = set()  # process ids
        self._kill_at = self._leave_at = math.inf  # on time.monotonic's clock

    def wait(self, work: threading.Thread) -> None:
        """Return when the thread has ended, or when it hangs though no rank is left."""
        while work.is_alive() and time.monotonic() < self._leave_at:
            work.join(POLL_S)
            if self._signals.received and work.is_alive():
                self._press()
        if self._signals.received and self.request is None:  # the ranks were quicker, being signalled themselves
            self.request = Request(self._signals.received[0], self._signals.immediate)

    def _press(self) -> None:
        immediate = self._signals.immediate
        if self.request is None:
            self.request = Request(self._signals.received[0])
            if immediate is None:
                self._ask(self.request.signal)
        if immediate is not None and self.request.immediate is None and not self.request.was_too_slow:
            self.request = replace(self.request, immediate=immediate)
            self._kill_at = time.monotonic()
            if not find_ranks(self._module):
                self._leave_at = self._kill_at
        self._kill_those_whose_time_is_up()

    def _ask(self, number: signal.Signals) -> None:
        for rank in find_ranks(self._module):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
                rank.send_signal(number)
            self._asked.add(rank.pid)
        self._kill_at = time.monotonic() + (self._grace_s if self._asked else 0)
        saving = f"saving after the current step, within {self._grace_s:g} s"
        waiting = f"no rank is running yet, exiting within {LEAVE_AFTER_S:g} s"
        quits = "SIGKILL" if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN else "SIGQUIT"  # as behind `&`
        again = "press Ctrl-C again" if number is signal.SIGINT else f"send {quits}"
        print_line(f"{number.name}: {saving if self._asked else waiting}; {again} to stop immediately")

    def _kill_those_whose_time_is_up(self) -> None:
        assert self.request is not None
        is_time = time.monotonic() >= self._kill_at
        for rank in find_ranks(self._module):
            is_new = rank.pid not in self._asked  # born after the request: nothing to save, and perhaps deaf yet
            if is_new or is_time:
                kill(rank)
                was_too_slow = self.request.was_too_slow or (not is_new and self.request.immediate is None)
                self.request = replace(self.request, killed=True, was_too_slow=was_too_slow)
        if is_time:
            self._leave_at = min(self._leave_at, time.monotonic() + LEAVE_AFTER_S)


def find_ranks(module: str) -> list[psutil.Process]:
    """The children of this process that live and run `python -m module`."""
    ranks = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if module in child.cmdline():
                ranks.append(child)
    return ranks


def kill(rank: psutil.Process) -> None:
    """End a rank and what it started at once; torchrun gives each rank a process group of its own."""
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.killpg(rank.pid, signal.SIGKILL)
