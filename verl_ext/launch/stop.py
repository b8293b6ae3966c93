"""The signals that ask the launcher to stop: noted always, raised while there is nothing to wait for."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from verl_ext.errors import SAME_REQUEST_S, STOP_SIGNALS, STOPPED_EXIT_CODE

LISTENED = (*STOP_SIGNALS, signal.SIGQUIT)
"""What the launcher handles until it exits, and ignores while Python exits."""


class StopRequest(BaseException):
    """The launcher was asked to stop while no rank ran; as with KeyboardInterrupt, no `except Exception` takes it.

    Attributes:
        signal: what asked.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)

    @property
    def exit_code(self) -> int:
        """75, which schedulers requeue; 131 for SIGQUIT, as for ranks that it ends."""
        return 128 + self.signal if self.signal is signal.SIGQUIT else STOPPED_EXIT_CODE


class StopSignals:
    """What this process was asked, in order.

    Schedulers and wrapper scripts signal the launcher and then its process group, or signal twice. Repeats of SIGTERM,
    SIGUSR1 and SIGHUP are therefore the same request; only SIGQUIT and a second Ctrl-C ask to stop without saving.

    Attributes:
        received: every signal so far.
        immediate: the SIGQUIT, or the SIGINT more than `SAME_REQUEST_S` after another one, that asked to stop without
            saving; None while there was none.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.immediate: signal.Signals | None = None
        self._interrupted_at = math.inf  # the first SIGINT, on time.monotonic's clock
        self._raises = False

    def install(self) -> None:
        """Begin to listen; a signal that whoever started us ignores (nohup) stays ignored."""
        for number in LISTENED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def ignore(self) -> None:
        """Ignore signals while Python exits: it restores the default actions, so a repeat would kill the process."""
        for number in LISTENED:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """For work that may be dropped anywhere: a signal ends it, also one that came before.

        Raises:
            StopRequest: at the first signal; those that follow are only noted.
        """
        self._raises = True
        try:
            self._raise_if_asked()  # after the line above, so that no signal falls between the two
            yield
        except Exception:
            self._raise_if_asked()  # what an import or a library makes of a request in its middle
            raise
        finally:
            self._raises = False
        self._raise_if_asked()  # a handler cannot raise inside a destructor

    def _handle(self, number: int, frame: FrameType | None) -> None:
        asked = signal.Signals(number)
        self.received.append(asked)
        if asked is signal.SIGINT:
            now = time.monotonic()
            self._interrupted_at = min(self._interrupted_at, now)
            is_immediate = now - self._interrupted_at > SAME_REQUEST_S
        else:
            is_immediate = asked is signal.SIGQUIT
        if is_immediate and self.immediate is None:
            self.immediate = asked
        if self._raises:
            self._raises = False
            raise StopRequest(number)

    def _raise_if_asked(self) -> None:
        if self.received:
            self._raises = False
            raise StopRequest(self.received[0])
