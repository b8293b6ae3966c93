"""Reads what an answer writes into memory that no fork inherits, so that no later answer finds it in its own."""

from __future__ import annotations

import mmap
import os

_CHUNK = 1 << 16
_TAIL = 2048
_STATUS = 1 << 16


def unforked(size: int) -> mmap.mmap:
    """Memory that a fork leaves out."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


class Capture:
    """Reads a pipe to its end and keeps the beginning of what came, or the end; never as an object of Python's."""

    def __init__(self, fd: int, memory: mmap.mmap, most: int, last: bool = False) -> None:
        """Keep at most `most` bytes in `memory`, which is larger by a chunk; of the end when `last`."""
        self.fd = fd
        self._memory, self._most, self._last = memory, most, last
        self._view = memoryview(memory)
        self._size = 0
        os.set_blocking(fd, False)

    @property
    def kept(self) -> memoryview:
        """What was kept, until the next capture in the same memory."""
        return self._view[: self._size]

    def read(self) -> bool:
        """Take one chunk; False at the end of the pipe, or when it is empty for now."""
        try:
            count = os.readv(self.fd, [self._view[self._size : self._size + _CHUNK]])
        except BlockingIOError:
            return False
        self._size += count
        if (excess := self._size - self._most) > 0:
            if self._last:
                self._memory.move(0, excess, self._most)
            self._size = self._most
        return count > 0

    def finish(self) -> None:
        """Take what is left, once nobody can write any more."""
        while self.read():
            pass
        os.close(self.fd)


class Captures:
    """Makes the captures of one run after the other, in the same memory."""

    def __init__(self) -> None:
        """Nothing is captured yet."""
        self._output = unforked(_CHUNK)
        self._errors, self._status = unforked(_TAIL + _CHUNK), unforked(_STATUS + _CHUNK)

    def output(self, fd: int, most: int) -> Capture:
        """The beginning of standard output."""
        if len(self._output) < most + _CHUNK:
            self._output = unforked(most + _CHUNK)
        return Capture(fd, self._output, most)

    def errors(self, fd: int) -> Capture:
        """The end of standard error."""
        return Capture(fd, self._errors, _TAIL, last=True)

    def status(self, fd: int) -> Capture:
        """What `answer.py` said of compiling."""
        return Capture(fd, self._status, _STATUS)
