"""A test sees an answer's objects as it would in the same process, except where the answer could lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from eval_pipeline.judge.client import JudgeServer
from eval_pipeline.judge.limits import Limits
from eval_pipeline.judge.verdict import Verdict
from tests.helpers.judge import function, submit_all

LIMITS = Limits(cpu_s=5, wall_s=60)
SAME = "def f(x): return x"
VECTOR = """
class f:
    def __init__(self, v): self.v = v
    def __eq__(self, other): return self.v == other.v
    def __mul__(self, k): return f(self.v * k)
    __rmul__ = __mul__
"""
OWN_ERROR = """
class Base(Exception): pass
class Own(Base, ValueError):
    def __init__(self, code):
        super().__init__('failed')
        self.code = code
    def __str__(self): return f'code {self.code}'
def f(x): raise Own(x)
"""
# makes its messages set attributes of the objects that arrive
SETS = """
import sys
values = sys.modules['values']
reduced = values._reduced
class Mark: pass
class Yes:
    def __mul__(self, other): return self
    def __lt__(self, other): return True
    __rmul__ = __mul__
    __gt__ = __le__ = __ge__ = __lt__
def set_with(what, parts, attributes):
    values._reduced = lambda kind, value: (what, parts, (None, attributes)) if kind is Mark else reduced(kind, value)
    return Mark()
"""
# program, test, whether it passes
CASES = {
    "the parts of a fraction": (
        SETS + "def f(x): return set_with(values.fraction, (1, 1), {'_numerator': Yes(), '_denominator': Yes()})",
        "assert f(3) > 5 and f(3) < 5",
        False,
    ),
    "methods of the test's class": (
        SETS + "def f(P):\n    number = object.__getattribute__(P, '_number')\n"
        "    return set_with(values.Handle, (number, False, 0), {'__eq__': str})",
        "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, other): return self.x == other.x\n"
        "assert f(P)(5) == P(6)",
        False,
    ),
    "the same object": (SAME, "x = [1]\nassert f(x) is x", True),
    "not a copy": (SAME, "x = [1]\nassert f(x) is not x", False),
    "a shallow copy": ("def f(x): return list(x)", "x = [[1]]\ny = f(x)\ny[0].append(2)\nassert x == [[1]]", False),
    "a deep copy": (
        "import copy\ndef f(x): return copy.deepcopy(x)",
        "x = [[1]]\ny = f(x)\ny[0].append(2)\nassert x == [[1]] and y == [[1, 2]]",
        True,
    ),
    "a part in a tuple": ("def f(x): return 1, x['a']", "x = {'a': [1]}\nassert f(x)[1] is x['a']", True),
    "sorted in place": ("def f(x): x.sort()", "x = [[3], [1]]\na, b = x\nf(x)\nassert x[0] is b and x[1] is a", True),
    "changed before it raises": (
        "def f(x):\n    x.append(2)\n    raise KeyError",
        "x = [1]\ntry: f(x)\nexcept KeyError: pass\nassert x == [1, 2]",
        True,
    ),
    "a global that changes": (
        "counter = 0\ndef f():\n    global counter\n    counter += 1",
        "before = counter\nf()\nassert (before, counter) == (0, 1)",
        True,
    ),
    "one object is one": ("class A: pass\na = A()\ndef f(x): return a", "assert f(1) is f(2) is a", True),
    "a number times an object": (VECTOR, "assert f(1) * 3 == f(3) == 3 * f(1)", True),
    "a product is no plain number": (
        "class A:\n    def __mul__(self, k): return 6\ndef f(x): return A()",
        "assert f(1) * 2 == 6",
        False,
    ),
    "a difference with a plain number": (
        "class A:\n    def __sub__(self, k): return 0.0\n    __rsub__ = __sub__\ndef f(x): return A()",
        "assert abs(f(1) - 6) < 1e-6",
        False,
    ),
    "membership is not the answer's": (
        "class A:\n    def __contains__(self, x): return True\ndef f(x): return A()",
        "assert 6 in f(1)",
        False,
    ),
    "membership of what can be iterated": (
        "class A:\n    def __iter__(self): return iter([6])\ndef f(x): return A()",
        "assert 6 in f(1) and 7 not in f(1)",
        True,
    ),
    "not callable": ("class f:\n    def __init__(self, x): pass", "assert not callable(f(1))", True),
    "not iterable": ("class f:\n    def __init__(self, x): pass", "assert not hasattr(f(1), '__iter__')", True),
    "callable": (
        "class A:\n    def __call__(self): return 1\ndef f(x): return A()",
        "assert callable(f(1)) and not hasattr(f(1), '__len__') and f(1)() == 1",
        True,
    ),
    "a docstring": ("def f(x):\n    'what it does'", "assert f.__doc__ == 'what it does' and f.__name__ == 'f'", True),
    "a Counter": (
        "from collections import Counter\ndef f(x): return Counter(x)",
        "assert f('aab').most_common(1) == [('a', 2)] and f('')['z'] == 0",
        True,
    ),
    "a Counter for it": (
        "def f(c): return c.most_common(1)",
        "from collections import Counter\nassert f(Counter('aab')) == [('a', 2)]",
        True,
    ),
    "a defaultdict": (
        "from collections import defaultdict\ndef f(x): return defaultdict(list, a=[1])",
        "d = f(1)\nassert d == {'a': [1]} and d['b'] == []",
        True,
    ),
    "a namedtuple": (
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int\ndef f(x): return P(x, 2)",
        "assert f(1) == (1, 2) and f(1).x == 1 and f(1)._asdict() == {'x': 1, 'y': 2}",
        True,
    ),
    "its own exception": (
        OWN_ERROR,
        "try: f(7)\nexcept Own as e: assert (e.code, str(e), e.args) == (7, 'code 7', ('failed',))\n"
        "else: assert False\ntry: f(7)\nexcept Base as e: assert isinstance(e, ValueError) and isinstance(e, Own)",
        True,
    ),
    "another exception of its own": (
        OWN_ERROR + "class Other(Exception): pass",
        "try: f(7)\nexcept Other: pass\nexcept Own: assert False",
        False,
    ),
    "a builtin exception": (
        "def f(x): raise ValueError(x)",
        "try: f(1)\nexcept Exception as e: assert type(e) is ValueError",
        True,
    ),
    "an exception of the standard library": (
        "import json\ndef f(x): return json.loads(x)",
        "import json\ntry: f('{')\nexcept json.JSONDecodeError: pass\nelse: assert False",
        True,
    ),
    "an exception that would catch the test's": (
        "E = AssertionError\ndef f(x): return 5",
        "try: assert f(1) == 6\nexcept E: pass",
        False,
    ),
    "its own assertion": (
        "class E(AssertionError): pass\ndef f(x): return 5",
        "try: assert f(1) == 6\nexcept E: pass",
        False,
    ),
    "a coroutine": ("async def f(x): return x + 1", "import asyncio\nassert asyncio.run(f(3)) == 4", True),
    "coroutines": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1",
        "import asyncio\nasync def main(): return await asyncio.gather(f(1), f(2))\n"
        "assert asyncio.run(main()) == [2, 3]",
        True,
    ),
    "an array": (
        "def f(x):\n    x.reverse()\n    return x",
        "from array import array\nx = array('i', [3, 1])\nassert f(x) is x and x == array('i', [1, 3])",
        True,
    ),
    "a file": (
        "def f(file): return len(file.readlines())",
        "import io\nfile = io.StringIO('a\\nb')\nassert f(file) == 2 and file.read() == ''",
        True,
    ),
}


@pytest.fixture(scope="module")
def judged() -> Iterator[Callable[[str], Verdict]]:
    """The verdict on a case, of a server at any level."""
    with JudgeServer(num_workers=2) as server:
        yield submit_all(server, {name: (function(*case[:2]), LIMITS) for name, case in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_objects(judged: Callable[[str], Verdict], name: str) -> None:
    """The one test passes or does not."""
    verdict = judged(name)
    assert (verdict.error_type == "success") == CASES[name][2], verdict.message
    assert verdict.error_type in ("success", "wrong_answer", "runtime_error")
