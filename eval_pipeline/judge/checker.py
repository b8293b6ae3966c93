"""Compares what a program printed with what it should have printed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import zip_longest

_BLOCK_CHARS = 1 << 14
"""Characters whose tokens are in memory at a time."""
_TOKEN = re.compile(r"\n|\S+")
_SPACE = re.compile(r"\s")
_INTEGER = re.compile(r"([+-]?)([0-9]+)")


def outputs_match(actual: str, expected: str, tolerance: float | None) -> bool:
    """Whether two outputs are the same, line by line, white space within a line and blank lines at the end aside.

    Outputs may be megabytes of line breaks, and one process compares for all workers: the comparison ends at the first
    difference, and its memory does not depend on the number of lines or tokens.

    Args:
        actual: what the program printed.
        expected: what it should have printed.
        tolerance: largest absolute or relative difference of two finite numbers at the same place, unless both are
            written as integers: those must be equal, for a count of 10^9 must not be off by 1000. None where all must
            be written the same.
    """
    actual, expected = actual.rstrip(), expected.rstrip()
    if actual == expected:
        return True
    start = _end_of_same_lines(actual, expected)
    pairs = zip_longest(_tokens(actual, start), _tokens(expected, start))
    return all(
        ours == theirs or (ours and theirs and "\n" not in (ours, theirs) and _same(ours, theirs, tolerance))
        for ours, theirs in pairs
    )


def _end_of_same_lines(actual: str, expected: str) -> int:
    """Where a line begins before which both are the same text; at most a block and a line before they differ."""
    start, end = 0, min(len(actual), len(expected))
    while start < end and actual[start : start + _BLOCK_CHARS] == expected[start : start + _BLOCK_CHARS]:
        start += _BLOCK_CHARS
    return actual.rfind("\n", 0, min(start, end)) + 1


def _tokens(text: str, start: int) -> Iterator[str]:
    """The words of a text and its line breaks, in their order."""
    while start < len(text):
        space = _SPACE.search(text, start + _BLOCK_CHARS)
        end = space.start() if space else len(text)
        yield from _TOKEN.findall(text, start, end)
        start = end


def _same(actual: str, expected: str, tolerance: float | None) -> bool:
    if actual == expected:
        return True
    if tolerance is None:
        return False
    integers = _integer(actual), _integer(expected)
    if integers[0] is not None and integers[1] is not None:
        return integers[0] == integers[1]
    number, wanted = _finite(actual), _finite(expected)
    if number is None or wanted is None:
        return False
    return math.isclose(number, wanted, rel_tol=tolerance, abs_tol=tolerance)


def _integer(token: str) -> tuple[bool, str] | None:
    """Sign and digits of an integer, none for zero: `int` refuses thousands of digits."""
    match = _INTEGER.fullmatch(token)
    if match is None:
        return None
    digits = match[2].lstrip("0")
    return match[1] == "-" and digits != "", digits


def _finite(token: str) -> float | None:
    """The number a token stands for; "1_000", which Python takes for one, is none in any output."""
    try:
        number = float(token)
    except ValueError:
        return None
    return number if math.isfinite(number) and "_" not in token else None
