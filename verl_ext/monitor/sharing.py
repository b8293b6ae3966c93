"""Results that all open pages share, so that ten visitors cost what one costs."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class SharedResults:
    """The most recently used results of slow functions, with the newest one for each key.

    Args:
        size: maximum number of keys.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def get(self, key: Hashable, stamp: object, compute: Callable[[], Result], reuse: float = 0.0) -> Result:
        """Return the result for a stamp; one thread computes it, and others wait for it.

        Args:
            key: what is computed.
            stamp: state of what it is computed from.
            compute: the function.
            reuse: for how many times the duration of its computation a result is returned for newer stamps, too.
        """
        with self._lock:
            entry = self._entries.get(key)
            is_new = entry is None or (entry.stamp != stamp and not entry.is_reusable())
            if entry is None or is_new:
                entry = self._entries[key] = _Entry(stamp, reuse)
            self._entries.move_to_end(key)
            if len(self._entries) > self._size:
                self._entries.popitem(last=False)
        if is_new:
            self._compute(key, entry, compute)
        return entry.future.result()

    def _compute(self, key: Hashable, entry: _Entry, compute: Callable[[], Any]) -> None:
        started = time.monotonic()
        try:
            entry.future.set_result(compute())
            entry.reused_until = time.monotonic() + entry.reuse * (time.monotonic() - started)
        except BaseException as error:
            with self._lock:
                if self._entries.get(key) is entry:
                    del self._entries[key]
            entry.future.set_exception(error)


class _Entry:
    """A result that is there or is being computed."""

    def __init__(self, stamp: object, reuse: float) -> None:
        self.stamp, self.reuse = stamp, reuse
        self.future: Future[Any] = Future()
        self.reused_until = 0.0

    def is_reusable(self) -> bool:
        """Whether to return this result for another stamp."""
        return self.reuse > 0 and (not self.future.done() or time.monotonic() < self.reused_until)
