"""Lets many runs go on at once, or one alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """A lock that is shared by most and held alone by a few, who go first."""

    def __init__(self) -> None:
        """Nobody is inside."""
        self._changed = threading.Condition()
        self._num_inside = 0
        self._num_waiting_alone = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside with others."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_waiting_alone == 0)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside while nobody else is."""
        with self._changed:
            self._num_waiting_alone += 1
            self._changed.wait_for(lambda: self._num_inside == 0)
            self._num_inside = 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside = 0
                self._num_waiting_alone -= 1
                self._changed.notify_all()
