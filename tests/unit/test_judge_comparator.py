"""Comparing a program's output with the expected output."""

from __future__ import annotations

import random
import signal
import socket
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import ANY

import pytest

from eval_pipeline.judge import ProgramCase, ProgramTests, ResourceLimits, Submission, Verdict, verdicts
from eval_pipeline.judge import comparator as comparator_module
from eval_pipeline.judge.comparator import Comparator
from eval_pipeline.judge.isolation import IsolationLevel
from eval_pipeline.judge.sandbox import ReadWriteLock
from eval_pipeline.judge.server import JudgeWorker
from eval_pipeline.judge.verdicts import outputs_match


@pytest.mark.parametrize(
    ("actual", "expected", "tolerance", "match"),
    [
        ("1 2\n3\n", "1 2\n3", None, True),
        ("1   2 \r\n3\n\n\n", "1 2\n3\n", None, True),
        ("", "\n\n", None, True),
        ("1\n\n2", "1\n2", None, False),
        ("1 2", "1\n2", None, False),
        ("\n \n3\nyes", "3\nyes\n", None, True),
        ("3\n\nyes", "3\nyes", None, False),
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
        # decimal numbers have a value
        ("0.5 2", "0.5000 2.0", None, True),
        ("-.50 +3.", "-0.5 3.0", None, True),
        ("-0.0", "0.00", None, True),
        ("2.0", "2", None, False),
        ("0.5001", "0.5", None, False),
        ("05", "5", None, False),
        ("1e0", "1.0", None, False),
        ("-0.5", "0.5", None, False),
        (".", "0.0", None, False),
        ("1" * 5000, "1" * 5000 + ".0", None, True),
    ],
)
def test_outputs_match_up_to_white_space_and_tolerance(
    actual: str, expected: str, tolerance: float | None, match: bool
) -> None:
    """Line breaks count; white space within lines and blank lines at both ends do not."""
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
        verdicts._same(a, b, tolerance) for x, y in zip(ours, theirs) for a, b in zip(x, y)
    )


def test_blockwise_comparison_equals_line_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random outputs and modified copies, with arbitrary block boundaries."""
    generator = random.Random(28)
    results = []
    for _ in range(1500):
        monkeypatch.setattr(verdicts, "_BLOCK_CHARS", generator.choice((1, 3, 8, 1 << 14)))
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
def test_memory_does_not_grow_with_output(actual: str, expected: str, match: bool) -> None:
    """Lists of lines or tokens would take 10 to 200 MB here; copies of the outputs take 1.5 MB."""
    tracemalloc.start()
    try:
        assert outputs_match(actual, expected, None) is match
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


LONG = "0.5 1 x\n" * 2**15


@pytest.fixture
def comparator() -> Iterator[Comparator]:
    """A comparator that is closed after the test."""
    comparator = Comparator()
    yield comparator
    comparator.close()


def test_time_of_first_answer_excludes_start_of_process(
    comparator: Comparator, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, start = SimpleNamespace(now=0.0), comparator._start

    def slow_start() -> socket.socket:
        clock.now += 5
        return start()

    monkeypatch.setattr(comparator_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(comparator, "_start", slow_start)
    assert comparator.judge("42", "42", ResourceLimits()) == Verdict("success", 1, 1, "", 0.0)
    assert clock.now == 5


def test_long_outputs_are_compared_in_another_process(comparator: Comparator, monkeypatch: pytest.MonkeyPatch) -> None:
    """In-process, the comparison would block all of the server's threads, which share one interpreter."""
    monkeypatch.setattr(comparator_module, "outputs_match", None)
    for actual, expected, tolerance, match in (
        (LONG + "1.0", LONG + "1", 1e-6, True),
        (LONG + "1.0", LONG + "1", None, False),
        (LONG + "é\ud800", LONG + " é\ud800\n\n", None, True),
        (LONG + "é", LONG + "e", 1e-6, False),
        (LONG, LONG + "x", None, False),
    ):
        assert comparator.outputs_match(actual, expected, tolerance) is match
    assert comparator.outputs_match(LONG + "yEs", LONG + "YES", None, any_case=True)
    assert not comparator.outputs_match(LONG + "yEs", LONG + "YES", None)
    assert comparator.judge("The answer is 42.", "42", ResourceLimits()).error_type == "success"


def test_short_outputs_start_no_process(comparator: Comparator) -> None:
    """Nor do long outputs that are identical or whose comparison ends with the shorter one."""
    assert comparator.outputs_match("1.0\n", "1", 1e-6)
    assert comparator.outputs_match(LONG, LONG + "\n\n", None)
    assert not comparator.outputs_match(LONG, "0.5 1 y", None)
    assert comparator._process is None


@pytest.mark.parametrize(
    ("answer", "reference", "message"),
    [
        ("so 12 apples", "18", "read 12, expected 18"),
        ("6 a day, so #### 7 * 6 = 43 dollars", "42", "read 43, expected 42"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{3}", r"read \frac{1}{2}, expected \frac{1}{3}"),
        ("The answer is (C).", "B", "read (C), expected B"),
        ("<answer>5</think> <answer>6</answer>", "7", "read 6, expected 7"),
        ("I do not know.", "18", "found no result, expected 18"),
        ("first\nsecond", "x + 1", "found no result, expected x + 1"),
        (r"\boxed{" + "x" * 500 + "}", "y", f"read {'x' * 200}..., expected y"),
    ],
)
def test_message_names_compared_result_and_reference(
    comparator: Comparator, answer: str, reference: str, message: str
) -> None:
    assert comparator.judge(answer, reference, ResourceLimits()) == Verdict("wrong_answer", 0, 1, message, ANY)


def test_comparison_timeout_raises_instead_of_verdict(comparator: Comparator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a failure of the judge, and the next comparison gets a new process."""
    assert comparator.outputs_match(LONG + "1.0", LONG + "1", 1e-6)
    monkeypatch.setattr(comparator_module, "_OUTPUTS_S", 0.2)
    assert comparator._process is not None
    comparator._process.send_signal(signal.SIGSTOP)
    with pytest.raises(OSError, match="could not be compared"):
        comparator.outputs_match(LONG + "1.0", LONG + "1", 1e-6)
    monkeypatch.undo()
    assert comparator.outputs_match(LONG + "1.0", LONG + "1", 1e-6)


def test_killed_comparison_is_repeated() -> None:
    """The worker repeats it and returns the verdict of an undisturbed one."""
    worker = JudgeWorker(IsolationLevel("rlimits"), ReadWriteLock())
    submission = Submission(
        f"print('0.5 1 x\\n' * {2**15} + '1.0')", ProgramTests((ProgramCase("", LONG + "1"),), 1e-6)
    )
    try:
        assert worker.judge(submission, ResourceLimits()).error_type == "success"
        process = worker._comparator._process
        assert process is not None
        process.kill()
        assert worker.judge(submission, ResourceLimits()).error_type == "success"
    finally:
        worker.close()
