"""Lets a program open its standard streams by name: `/dev/stdin` is a link into /proc, which is hidden from it."""

from __future__ import annotations

import builtins
import functools
import io
import os
from typing import Any

_NUMBERS = {f"/dev/{name}": number for number, name in enumerate(("stdin", "stdout", "stderr"))}
_NUMBERS |= {f"/dev/fd/{number}": number for number in range(3)}
_NUMBERS |= {f"/proc/self/fd/{number}": number for number in range(3)}


def make_openable() -> None:
    """Replace `open` in this process."""
    # no plain function: kept in a class, it would become a method, as the real one does not
    builtins.open = io.open = functools.update_wrapper(functools.partial(_open), io.open)


def _open(file: Any, *arguments: Any, **named: Any) -> Any:
    number = _NUMBERS.get(str(file)) if isinstance(file, (str, os.PathLike)) else None
    return _opened(file if number is None else os.dup(number), *arguments, **named)


_opened = io.open
