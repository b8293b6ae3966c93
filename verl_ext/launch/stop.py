"""The signals that ask the launcher to stop: noted always, raised while there is nothing to wait for."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from verl_ext.errors import STOP_SIGNALS


class StopRequest(BaseException):
    """The launcher was asked to stop while no rank ran; as with KeyboardInterrupt, no `except Exception` takes it.

    Attributes:
        signal: what asked.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


class StopSignals:
    """What this process was asked, in order.

    Attributes:
        received: every stop signal so far.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._raises = False

    def install(self) -> None:
        """Begin to listen; a signal that whoever started us ignores (nohup) stays ignored."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

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
        self.received.append(signal.Signals(number))
        if self._raises:
            self._raises = False
            raise StopRequest(number)

    def _raise_if_asked(self) -> None:
        if self.received:
            self._raises = False
            raise StopRequest(self.received[0])
