"""Imports large packages without looking for garbage among what they make."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Around imports at the start of a process.

    Modules make hundreds of thousands of objects that live as long as the process. Python's collector goes through all
    of them again and again while they grow, which took a fifth of a rank's imports; here it rests, and afterwards it
    leaves what is there by then out of account for good.
    """
    if not gc.isenabled():  # somebody else decides
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
