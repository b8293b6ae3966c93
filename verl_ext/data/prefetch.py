"""Makes the next batch while the step works on the present one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar, cast

T = TypeVar("T")
_END = object()


class Prefetcher(Generic[T]):
    """Iterates one item ahead, in a thread: for what needs no process of its own, as samples that are in memory.

    Args:
        items: begun anew by each iteration.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[T]:
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
            source = iter(self._items)
            coming = thread.submit(next, source, _END)
            while (item := coming.result()) is not _END:
                coming = thread.submit(next, source, _END)
                yield cast("T", item)
