"""Turns a request to stop into an exception, so that claims are given back and every process is ended."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from verl_ext.errors import STOP_SIGNALS


class StopRequested(BaseException):
    """The command was asked to stop; no `Exception`, so that nothing on the way takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Within the block, the first stop signal raises `StopRequested`; a second one kills as usual."""

    def stop(number: int, frame: FrameType | None) -> None:
        for name in STOP_SIGNALS:
            signal.signal(name, signal.SIG_DFL)
        raise StopRequested(number)

    before = {name: signal.signal(name, stop) for name in STOP_SIGNALS}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
