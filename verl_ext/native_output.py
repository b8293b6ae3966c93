"""Keeps C++ libraries from writing between the lines that are meant for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_native_stdout() -> Iterator[None]:
    """Drop what is written to file descriptor 1: gloo greets every peer of every group there, with no switch for it."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "w") as sink:
        os.dup2(sink.fileno(), 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
