"""Prefetching one item: the same items, produced while the previous one is processed, and errors at the right item."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from verl_ext.data.batching import Prefetcher


def test_prefetcher_yields_same_items_each_time() -> None:
    batches = Prefetcher(range(5))
    assert list(batches) == list(batches) == [0, 1, 2, 3, 4]
    assert list(Prefetcher([])) == []


def test_next_item_is_produced_in_background() -> None:
    made = [threading.Event(), threading.Event(), threading.Event()]

    def items() -> Iterator[int]:
        for number, event in enumerate(made):
            event.set()
            yield number

    batches = iter(Prefetcher(items()))
    assert next(batches) == 0
    assert made[1].wait(10)  # although nobody has asked for it
    assert not made[2].is_set()
    batches.close()


def test_error_is_raised_when_its_item_is_requested() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("row 7")

    batches = iter(Prefetcher(items()))
    assert next(batches) == 1
    with pytest.raises(ValueError, match="row 7"):
        next(batches)
