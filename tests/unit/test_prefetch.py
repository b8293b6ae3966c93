"""One item ahead: the same items, made while the one before is worked on, and errors where they belong."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from verl_ext.data.batching import Prefetcher


def test_the_items_are_the_same_each_time() -> None:
    batches = Prefetcher(range(5))
    assert list(batches) == list(batches) == [0, 1, 2, 3, 4]
    assert list(Prefetcher([])) == []


def test_the_next_item_is_made_while_this_one_is_worked_on() -> None:
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


def test_an_error_comes_when_its_item_is_asked_for() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("row 7")

    batches = iter(Prefetcher(items()))
    assert next(batches) == 1
    with pytest.raises(ValueError, match="row 7"):
        next(batches)
