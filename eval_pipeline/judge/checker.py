"""Compares what a program printed with what it should have printed."""

from __future__ import annotations

import math
import re

_INTEGER = re.compile(r"([+-]?)([0-9]+)")


def outputs_match(actual: str, expected: str, tolerance: float | None) -> bool:
    """Whether two outputs are the same, line by line, white space within a line and blank lines at the end aside.

    Args:
        actual: what the program printed.
        expected: what it should have printed.
        tolerance: largest absolute or relative difference of two finite numbers at the same place, unless both are
            written as integers: those must be equal, for a count of 10^9 must not be off by 1000. None where all must
            be written the same.
    """
    actual_lines, expected_lines = _tokens(actual), _tokens(expected)
    return len(actual_lines) == len(expected_lines) and all(
        len(ours) == len(theirs) and all(_same(a, b, tolerance) for a, b in zip(ours, theirs))
        for ours, theirs in zip(actual_lines, expected_lines)
    )


def _tokens(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


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
