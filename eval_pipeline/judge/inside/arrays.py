"""NumPy's arrays and numbers on their way between an answer and its test: bytes, rebuilt by the reader's NumPy."""

from __future__ import annotations

import re
import sys
from typing import Any

_KINDS = re.compile(r"[<>|=][biufcSUmM]\d+(\[\w+\])?")
"""Types of elements that are plain bytes; others hold objects or code."""


def reduced(value: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """How to send an array or a number; None for anything else, and for an array that cannot travel."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)) or not _KINDS.fullmatch(value.dtype.str):
        return None
    rebuild = array if isinstance(value, numpy.ndarray) else scalar
    return rebuild, (value.dtype.str, value.shape, value.tobytes())


def array(kind: str, shape: tuple[int, ...], data: bytes) -> Any:
    """An array of this type and shape, in C order.

    Raises:
        ValueError: the type is none that is plain bytes, or the data are not of that size.
    """
    import numpy

    if not _KINDS.fullmatch(kind):
        raise ValueError(f"an array of {kind}")
    element = numpy.dtype(kind)
    if element.itemsize == 0:  # of an empty text, which `frombuffer` refuses
        return numpy.zeros(shape, element)
    return numpy.frombuffer(data, element).reshape(shape).copy()


def scalar(kind: str, shape: tuple[int, ...], data: bytes) -> Any:
    """A number of this type.

    Raises:
        ValueError: as `array`.
    """
    return array(kind, shape, data)[()]


def is_array(value: Any) -> bool:
    """Whether a value is an array that travels."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and _KINDS.fullmatch(value.dtype.str) is not None


def update(old: Any, new: Any) -> None:
    """Give one array the content of another, where their shapes and types are the same."""
    if old.shape == new.shape and old.dtype == new.dtype and old.flags.writeable:
        old[...] = new
