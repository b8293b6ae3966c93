"""Comparing a program's output with the expected one."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from eval_pipeline.judge import checker
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


SPACES = (" ", " ", "\t", "\r", "\x1c", "\u2028", "  ", "\n", "\n", "\n\n", "\r\n", "")
TOKENS = ("1", "2", "1.0", "1.0000001", "01", "-1", "x", "nan", "1e5", "100000", "1_0", "é", "\ud800", "0")


def _by_definition(actual: str, expected: str, tolerance: float | None) -> bool:
    def lines(text: str) -> list[list[str]]:
        rows = [line.split() for line in text.split("\n")]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    ours, theirs = lines(actual), lines(expected)
    return [*map(len, ours)] == [*map(len, theirs)] and all(
        checker._same(a, b, tolerance) for x, y in zip(ours, theirs) for a, b in zip(x, y)
    )


def test_outputs_are_compared_as_lists_of_lines_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random outputs and changed copies of them, with blocks that end anywhere."""
    generator = random.Random(28)
    results = []
    for _ in range(1500):
        monkeypatch.setattr(checker, "_BLOCK_CHARS", generator.choice((1, 3, 8, 1 << 14)))
        parts = [generator.choice(TOKENS) + generator.choice(SPACES) for _ in range(generator.randint(0, 12))]
        expected = [part + generator.choice(("", " ")) * part[-1].isspace() for part in parts]
        for change in (TOKENS, SPACES)[: generator.randint(0, 2)]:
            expected.insert(generator.randint(0, len(expected)), generator.choice(change))
        pair = "".join(parts), "".join(expected) + generator.choice(("", "\n", " \n\n"))
        for tolerance in (None, 1e-6):
            results.append(outputs_match(*pair, tolerance))
            assert results[-1] is _by_definition(*pair, tolerance), (pair, tolerance)
    assert 300 < sum(results) < 2700


@pytest.mark.parametrize(
    ("actual", "expected", "match"),
    [
        ("\n" * 2**20 + "x", "\n" * 2**20 + "y", False),
        ("2" + "\n" * 2**20, "2\n", True),
        ("1 \n" * 2**17, "1\n" * 2**17, True),
        ("1 " * 2**17, "1\t" * 2**17, True),
    ],
)
def test_memory_does_not_grow_with_the_output(actual: str, expected: str, match: bool) -> None:
    """Lists of lines or tokens would take 10 to 200 MB here; copies of the outputs take 1.5."""
    tracemalloc.start()
    try:
        assert outputs_match(actual, expected, None) is match
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()
