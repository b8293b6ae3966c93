"""Runs one piece of work beside the training, and hands over what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """A thread that does one thing.

    Args:
        work: what to do; may raise anything.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._result: list[T] = []
        self._error: BaseException | None = None
        # A daemon: a rank that crashes must not be kept alive by a thread that waits for the other ranks.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the work has ended, well or not."""
        return not self._thread.is_alive()

    def result(self) -> T:
        """Wait for the end and return what the work returned, or raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        try:
            self._result.append(self._work())
        except BaseException as error:
            self._error = error
