"""Comparing a program's output with the expected one."""

from __future__ import annotations

import pytest

from eval_pipeline.judge.checker import outputs_match


@pytest.mark.parametrize(
    ("actual", "expected", "tolerance", "match"),
    [
        ("1 2\n3\n", "1 2\n3", None, True),
        ("1   2 \r\n3\n\n\n", "1 2\n3\n", None, True),
        ("", "\n\n", None, True),
        ("1\n\n2", "1\n2", None, False),
        ("1 2", "1\n2", None, False),
        ("1 2", "1 2 3", None, False),
        ("YES", "Yes", None, False),
        ("1.0", "1", None, False),
        ("1.0", "1", 1e-6, True),
        ("1.0000005", "1", 1e-6, True),
        ("1.00001", "1", 1e-6, False),
        ("1000000.5", "1000000", 1e-6, True),
        # two integers are counts, whatever the tolerance
        ("1000000007", "1000000006", 1e-6, False),
        ("1000000007.0", "1000000006", 1e-6, True),
        ("3", "2", 2.0, False),
        ("-5", "5", 100.0, False),
        ("+05 -0 00", "5 0 0", 1e-6, True),
        ("0" * 1_000_000 + "x", "0", 1e-6, False),
        ("1" * 5000, "1" * 4999 + "2", 1e-6, False),
        ("0.0000009", "0", 1e-6, True),
        ("nan", "1", 1e-6, False),
        ("nan", "nan", 1e-6, True),
        ("inf", "1e999", 1e-6, False),
        ("1_0", "10", 1e-6, False),
        ("x 1.0", "y 1.0", 1e-6, False),
        ("a\x0bb", "a b", None, True),
    ],
)
def test_outputs_match(actual: str, expected: str, tolerance: float | None, match: bool) -> None:
    """Lines count, white space inside and blank lines at the end do not."""
    assert outputs_match(actual, expected, tolerance) is match
