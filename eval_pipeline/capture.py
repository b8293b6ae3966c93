"""Reads what a sandboxed program writes, keeping a bounded part of it."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from types import TracebackType

OUTPUT_BYTES = 16 * 1024
"""Kept of standard output and error; the rest is read and dropped, so that a talkative answer does not block."""
REPORT_BYTES = 4 * 1024 * 1024
"""Kept of the runner's report; an answer that floods it only cuts its own report short."""

_CHUNK = 64 * 1024
_POLL_S = 0.01


class Capture:
    """Two pipes, one for a program's output and one for the runner's report."""

    def __init__(self) -> None:
        """Open both pipes; only what `subprocess` is told to pass on is inherited."""
        self._output, self.output_fd = os.pipe()
        self._report, self.report_fd = os.pipe()
        self._kept = {self._output: bytearray(), self._report: bytearray()}
        self._room = {self._output: OUTPUT_BYTES, self._report: REPORT_BYTES}
        self._write_ends_open = True

    def __enter__(self) -> Capture:
        """Begin; the pipes are closed on leaving."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every descriptor."""
        self._close_write_ends()
        os.close(self._output)
        os.close(self._report)

    def read_until(self, ended: Callable[[], bool], deadline: float) -> bool:
        """Read until the program has ended.

        Args:
            ended: tells whether it has; asked at least every 10 ms, for a child of its may keep the pipes open.
            deadline: `time.monotonic()` seconds at which to give up.

        Returns:
            Whether it ended before the deadline.
        """
        self._close_write_ends()
        with selectors.DefaultSelector() as selector:
            for fd in self._kept:
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ)
            return self._read_ready(selector, ended, deadline)

    def _read_ready(self, selector: selectors.BaseSelector, ended: Callable[[], bool], deadline: float) -> bool:
        while not ended():
            if time.monotonic() >= deadline:
                return False
            for key, _ in selector.select(_POLL_S):
                if not self._read(key.fd):
                    selector.unregister(key.fd)
        return True

    def drain(self) -> tuple[bytes, bytes]:
        """Output and report, with what was still in the pipes when the program ended."""
        for fd in self._kept:
            # a pipe holds at most 1 MiB; whoever escaped and writes on must not keep us here
            for _ in range(16):
                if not self._read(fd):
                    break
        return bytes(self._kept[self._output]), bytes(self._kept[self._report])

    def _read(self, fd: int) -> bool:
        """Take one chunk; False at the end of the pipe, or when it is empty for now."""
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        self._kept[fd] += chunk[: self._room[fd] - len(self._kept[fd])]
        return bool(chunk)

    def _close_write_ends(self) -> None:
        if self._write_ends_open:
            os.close(self.output_fd)
            os.close(self.report_fd)
            self._write_ends_open = False
