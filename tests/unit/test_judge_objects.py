"""A test sees an answer's objects as in the same process, unless the answer could use them to deceive it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from eval_pipeline.judge import JudgeClient, ResourceLimits, Verdict
from tests.helpers.judge import function, judge_config, submit_all

LIMITS = ResourceLimits(cpu_s=5, wall_s=60)
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
SWALLOWS = """
class Manager:
    def __enter__(self): return 5
    def __exit__(self, *error): return True
def f(x): return Manager()
"""
SUPPRESS = """
class f:
    def __init__(self, *kinds): self.kinds = kinds
    def __enter__(self): pass
    def __exit__(self, kind, error, trace): return kind is not None and issubclass(kind, self.kinds)
"""
SUPPRESS_BY_GENERATOR = """
import contextlib
@contextlib.contextmanager
def f(*kinds):
    try: yield
    except kinds: pass
"""
SUPPRESSED = """
with f(ValueError): raise ValueError
with f(ValueError): int('x')
with f(OSError, ZeroDivisionError): 1 / 0
try:
    with f(ValueError): 1 / 0
except ZeroDivisionError: pass
else: assert False
"""
CALLED = "def g(x):\n    assert x == 6, 'msg'\n    return x\n"
WRAPS = """
import functools
def f(g):
    @functools.wraps(g)
    def h(*arguments): return g(*arguments) + 1
    return h
"""
CHANGING = {
    "float": "[1.0, 2.0]",
    "int": "[1, 2]",
    "index": "[1, 2]",
    "bool": "[True, False]",
    "len": "[1, 2]",
    "hash": "[1, 2]",
    "str": "'ab'",
    "repr": "'ab'",
    "complex": "[1j, 2j]",
    "round": "[1, 2]",
    "trunc": "[1, 2]",
    "format": "'ab'",
    "getitem": "[1, 2]",
    "abs": "[1, 2]",
}
"""Special methods whose result changes with every call, and what they return by turns."""
CONVERTED = {"index": "range(y)", "format": "f'{y}'", "getitem": "y[0]", "trunc": "math.trunc(y)"}
GROWS = """
class f:
    def __init__(self): self.n = 0
    def push(self): self.n += 1
    def __len__(self): return self.n
    def __bool__(self): return self.n > 0
    def __float__(self): return float(self.n)
    def __str__(self): return str(self.n)
    def __getitem__(self, i): return self.n + i
    def __setitem__(self, i, n): self.n = n
    def __iter__(self): return self
    def __next__(self):
        self.n -= 1
        return self.n
"""
GROWN = """
def is_all(s, n): return (len(s), bool(s), float(s), str(s), s[1]) == (n, n > 0, n, str(n), n + 1)
s = f()
assert is_all(s, 0)
s.push()
assert is_all(s, 1)
s[0] = 5
assert is_all(s, 5)
s.n = 7
assert is_all(s, 7)
assert next(s) == 6 and is_all(s, 6)
"""
OWN_CLASS = """
class A:
    def __init__(self, x, next=None): self.x, self.next = x, next
    def __eq__(self, other): return self.x == other.x
    def __hash__(self): return hash(self.x)
    def __lt__(self, other): return self.x < other.x
    def __add__(self, other): return A(self.x + other.x)
    def check(self, x): return self.x == x
"""
RUNNER = """
import unittest
class T(unittest.TestCase):
    def test_value(self):
        for x in (1, 2):
            with self.subTest(x=x): self.assertEqual(f(x), x + 1)
    def test_error(self):
        with self.assertRaises(Exception): f("x")
result = unittest.TestResult()
unittest.defaultTestLoader.loadTestsFromTestCase(T).run(result)
assert result.wasSuccessful()
"""
TASKS = """
import asyncio
async def call():
    assert f(1) == 2
async def main():
    tasks = [asyncio.ensure_future(call())]
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled(): task.result()
asyncio.run(main())
"""
SEQUENCE = """
class Pairs:
    def __getitem__(self, i):
        if i > 2: raise IndexError
        return i, f(i)
for i, value in Pairs(): assert value == i + 1
"""
ASYNC_ITERATOR = """
import asyncio
class Values:
    def __aiter__(self): return self
    async def __anext__(self): return f(1)
async def main():
    async for value in Values(): assert value == 2
asyncio.run(main())
"""
THREAD = """
import threading
values = []
thread = threading.Thread(target=lambda: values.append(f(1)))
thread.start()
thread.join()
for value in values: assert value == 2
"""
REVERSE = """
def f(head):
    last = None
    while head: head.next, last, head = last, head, head.next
    return last
"""


def _changing(name: str) -> tuple[str, str, bool]:
    program = (
        f"class Y:\n    n = 0\n    def __{name}__(self, *a):\n        Y.n += 1\n"
        f"        return {CHANGING[name]}[Y.n % 2]\ndef f(x): return Y()"
    )
    converted = CONVERTED.get(name, f"{name}(y)")
    return program, f"import math\ny = f(1)\nassert {converted} != {converted}", False


# program, test, whether it passes
CASES = {
    **{f"a __{name}__ that changes": _changing(name) for name in CHANGING},
    "a root that changes": (
        _changing("float")[0],
        "import math\ny = f(1)\nassert math.pow(y, 1) == 2 and math.pow(y, 1) == 1",
        False,
    ),
    "a comparison that changes": (
        "class Y:\n    n = 0\n    def __eq__(self, other):\n        Y.n += 1\n        return Y.n % 2 == 0\n"
        "def f(x): return Y()",
        "y, z = f(1), f(2)\nassert (y == z) != (y == z)",
        False,
    ),
    "an object that grows": (GROWS, GROWN, True),
    "an assertion swallowed by a with": (SWALLOWS, "with f(1) as y: assert y == 6", False),
    "an assertion of a function swallowed by a with": (
        SWALLOWS,
        "def check(y): assert y == 6\ndef test(f):\n    with f(1) as y:\n        check(y)\ntest(f)",
        False,
    ),
    "an assertion swallowed by a stack": (
        SWALLOWS,
        "import contextlib\nwith contextlib.ExitStack() as s:\n    y = s.enter_context(f(1))\n    assert y == 6",
        False,
    ),
    "an assertion skipped by a with": (SWALLOWS, "with f(1) as y: assert y[0] == 6", False),
    "an assertion of a function skipped by a with": (
        SWALLOWS,
        "def check(y): assert y == 6\nwith f(1) as y:\n    check(y[0])",
        False,
    ),
    "an assertion that becomes an error": (
        SWALLOWS.replace("return True", "raise ValueError"),
        "try:\n    with f(1) as y: assert y == 6\nexcept ValueError: pass",
        False,
    ),
    "a with that ends": (
        "class f:\n    log = []\n    def __enter__(self): return 1\n"
        "    def __exit__(self, *error): f.log.append(error)",
        "with f() as y: assert y == 1\nassert f.log == [(None, None, None)]",
        True,
    ),
    "a with of a generator that ends": (
        "import contextlib\nlog = []\n@contextlib.contextmanager\ndef f(x):\n    yield x + 1\n    log.append('end')",
        "with f(1) as y: assert y == 2\nassert log == ['end']",
        True,
    ),
    "a stack that ends": (
        f"{SWALLOWS}import contextlib\nclosed = []\ndef g():\n    stack = contextlib.ExitStack()\n"
        "    stack.callback(closed.append, 1)\n    return stack",
        "import contextlib\nwith g() as s, contextlib.ExitStack() as t: assert t.enter_context(f(1)) == 5\n"
        "assert closed == [1]",
        True,
    ),
    "a with that swallows, but nothing raises": (SWALLOWS, "with f(1) as y: assert y == 5\nassert y == 5", True),
    "errors that a with may swallow": (SUPPRESS, SUPPRESSED, True),
    "errors that a generator may swallow": (SUPPRESS_BY_GENERATOR, SUPPRESSED, True),
    "a with that swallows all": (SWALLOWS, SUPPRESSED, False),
    "a context manager": (
        "import contextlib\nlog = []\n@contextlib.contextmanager\ndef f(x):\n    try: yield x + 1\n"
        "    except KeyError as error:\n        log.append(error.args)\n        raise\n    finally: log.append('end')",
        "try:\n    with f(1) as y:\n        assert y == 2\n        raise KeyError('k')\nexcept KeyError as e: pass\n"
        "assert log == [('k',), 'end']",
        True,
    ),
    "an assertion thrown into a generator": (
        "class f:\n    def __init__(self, x): pass\n    def __iter__(self): return self\n"
        "    def __next__(self): return 5\n    def throw(self, *error): raise StopIteration\n"
        "    def close(self): pass",
        "import contextlib\n@contextlib.contextmanager\ndef manager(): yield from f(1)\n"
        "with manager() as y: assert y == 6",
        False,
    ),
    "an assertion that a generator swallows": (
        "def f(x):\n    try: yield 5\n    except BaseException: pass",
        "import contextlib\nwith contextlib.contextmanager(f)(1) as y: assert y == 6",
        False,
    ),
    "an error thrown into a generator": (
        "def f():\n    try: yield 1\n    except ValueError as error: yield error.args",
        "g = f()\nnext(g)\nassert g.throw(ValueError('a')) == ('a',)",
        True,
    ),
    "an assertion in a callback": (
        "def f(g):\n    try: return g(5)\n    except BaseException: return 6",
        CALLED + "assert f(g) == 6",
        False,
    ),
    "another error for an assertion in a callback": (
        "def f(g):\n    try: g(5)\n    except BaseException: raise ValueError",
        CALLED + "try: f(g)\nexcept ValueError: pass",
        False,
    ),
    "an assertion in an iterator": (
        "def f(xs):\n    try: list(xs)\n    except BaseException: pass",
        "def xs():\n    yield 1\n    assert False\nf(xs())",
        False,
    ),
    "an assertion of a callback that the test expects": (
        "def f(g): return g(5)",
        CALLED + "try: f(g)\nexcept AssertionError as e: assert e.args == ('msg',)\nelse: assert False",
        True,
    ),
    "an end of the loop over map": (
        "def f(x): raise StopIteration",
        "for a, b in zip(map(f, [1, 2]), [2, 3]): assert a == b",
        False,
    ),
    "an end of map in all": ("def f(x): raise StopIteration", "assert all(map(f, [1, 2]))", False),
    "an end that the test expects": (
        "def f(x): raise StopIteration",
        "try: f(1)\nexcept StopIteration: pass\nelse: assert False",
        True,
    ),
    "the tests of unittest": ("def f(x): return x + 1", RUNNER, True),
    "a skipped test": ("import unittest\ndef f(x): raise unittest.SkipTest", RUNNER, False),
    "a skipped test by its own class": (
        "import unittest\nclass E(unittest.SkipTest): pass\nclass f:\n    def __init__(self, x): raise E",
        RUNNER,
        False,
    ),
    "the end of a test of unittest": ("import unittest\ndef f(x): raise unittest.case._ShouldStop", RUNNER, False),
    "a cancelled task": ("import asyncio\ndef f(x): raise asyncio.CancelledError", TASKS, False),
    "a cancelled task that the test expects": (
        "import asyncio\nasync def f(x): raise asyncio.CancelledError",
        "import asyncio\nasync def main():\n    try: await f(1)\n    except asyncio.CancelledError: return 1\n"
        "assert asyncio.run(main()) == 1",
        True,
    ),
    "an end of a sequence of the test": ("def f(x): raise IndexError", SEQUENCE, False),
    "an end of an asynchronous iterator of the test": ("def f(x): raise StopAsyncIteration", ASYNC_ITERATOR, False),
    "an end of a thread": ("def f(x): raise SystemExit", THREAD, False),
    "an end of a thread by a class named as a word of the test": (
        "class values(Exception): pass\ndef f(x): raise values",
        THREAD,
        False,
    ),
    "no attribute of an object of the test": (
        "def f(x): raise AttributeError",
        "class A:\n    @property\n    def b(self): return f(1)\na = A()\nif hasattr(a, 'b'): assert a.b == 2",
        False,
    ),
    "an error that its callback gets back": (
        "def f(g):\n    try: g()\n    except KeyError: return 1\ndef h(): raise KeyError",
        "def g(): h()\nassert f(g) == 1",
        True,
    ),
    "an error that its context manager gets back": (
        "import contextlib\n@contextlib.contextmanager\ndef f():\n    try: yield\n    except KeyError: pass\n"
        "def h(): raise KeyError",
        "g = h\nwith f(): g()",
        True,
    ),
    "errors that the test handles by other names": (
        "class E(Exception): pass\nErrors = E, KeyError\ndef f(x): raise [E, KeyError, OSError, IndexError][x]",
        "for x in (0, 1):\n    try: f(x)\n    except Errors: pass\ntry: f(2)\nexcept IOError: pass\n"
        "try: f(3)\nexcept LookupError: pass",
        True,
    ),
    "an error that the test handles by an alias": (
        "import socket\ndef f(x): raise socket.timeout",
        "import socket\ntry: f(1)\nexcept socket.timeout: pass\nelse: assert False",
        True,
    ),
    "an error that the test takes from a future": (
        "def f(x): raise ValueError",
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(1) as pool:\n"
        "    assert pool.submit(f, 1).exception() is not None",
        True,
    ),
    "an end of its own sequence": (
        "class f:\n    def __getitem__(self, i):\n        if i > 2: raise IndexError\n        return i",
        "assert list(f()) == [0, 1, 2] and not hasattr(f(), 'x')",
        True,
    ),
    "a generator that is sent to": (
        "def f():\n    x = yield 1\n    yield x",
        "def test():\n    yield (yield from f())\ng = test()\nassert (next(g), g.send(5), next(g)) == (1, 5, None)",
        True,
    ),
    "functools.wraps": (
        WRAPS,
        "def g(x):\n    'doc'\n    return x\nh = f(g)\n"
        "assert (h(1), h.__name__, h.__qualname__, h.__doc__) == (2, 'g', 'g', 'doc') and f(lambda x: x)(1) == 2",
        True,
    ),
    "the name of a function": (
        "def f(g): return g.__name__",
        "def g(x): return x\nassert f(g) == 'g'",
        True,
    ),
    "no globals of a function": (
        "def f(g): return any(hasattr(g, name) for name in ('__globals__', '__code__', '__closure__', '__defaults__'))",
        "def g(x): return x\nassert not f(g)",
        True,
    ),
    "functions in a dict": (
        "import functools\ndef f(g): return {g: 1}[g], functools.lru_cache(g)(1)",
        "def g(x): return x\nassert f(g) == (1, 1)",
        True,
    ),
    "objects of the test in a set": (
        "def f(a, b, c): return len({a, b, c}), a == b, a != c, sorted([c, a])[0] is a, (a + c).x",
        OWN_CLASS + "assert f(A(1), A(1), A(2)) == (2, True, True, True, 3)",
        True,
    ),
    "a linked list of the test": (
        REVERSE,
        OWN_CLASS + "y = f(A(1, A(2)))\nassert (y.x, y.next.x, y.next.next) == (2, 1, None)",
        True,
    ),
    "a class of the test": (
        "def f(a, A): return isinstance(a, A), isinstance(5, A)",
        OWN_CLASS + "assert f(A(1), A) == (True, False)",
        True,
    ),
    "a context manager of the test": (
        "def f(manager):\n    try:\n        with manager as x: assert x == 6\n    except AssertionError: return x + 1",
        "class A:\n    log = []\n    def __enter__(self): return 5\n"
        "    def __exit__(self, kind, *error): A.log.append((kind, isinstance(error[0], kind)))\n"
        "assert f(A()) == 6 and issubclass(A.log[0][0], AssertionError) and A.log[0][1]",
        True,
    ),
    "a context manager of the test that ends": (
        "def f(manager):\n    with manager as x: return x + 1",
        "class A:\n    log = []\n    def __enter__(self): return 5\n"
        "    def __exit__(self, *error): A.log.append(error)\nassert f(A()) == 6 and A.log == [(None, None, None)]",
        True,
    ),
    "an assertion of the answer in a generator of the test": (
        "def f(manager):\n    try:\n        with manager as x: assert x == 6\n    except AssertionError: return x + 1",
        "import contextlib\n@contextlib.contextmanager\ndef manager(): yield 5\nassert f(manager()) == 6",
        True,
    ),
    "a method of the test": (
        "def f(a):\n    try: a.check = lambda x: True\n    except AttributeError: pass",
        OWN_CLASS + "a = A(5)\nf(a)\nassert a.check(6)",
        False,
    ),
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
    "a product is not a plain number": (
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


ENDLESS = "class A:\n    def __eq__(self, other): return False\n    def __repr__(self):\n        while True: pass\n"
MESSAGES = {
    "equal": ("def f(x): return x + 2", "assert f(1) == 2", "3 == 2 is false in `assert f(1) == 2`"),
    "in a function": (
        "def f(x): return [x]",
        "def check(f):\n    for n in (1, 2):\n        assert f(n) in ([1], [3])\ncheck(f)",
        "[2] in ([1], [3]) is false in `assert f(n) in ([1], [3])`",
    ),
    "NaN": ("def f(x): return float('nan')", "assert abs(f(1) - 2) < 1e-6", "nan < 1e-06 is false in"),
    "long": ("def f(x): return 'a' * 10**6", "assert f(1) == 2", "aaa' == 2 is false in `assert f(1) == 2`"),
    "large": ("def f(x): return 10**6000", "assert f(1) <= 2", "<int of 19932 bits> <= 2 is false in"),
    "an object": (f"{ENDLESS}def f(x): return A()", "assert f(1) == 2", "<object> == 2 is false in"),
    "objects": (f"{ENDLESS}def f(x): return [A()]", "assert f(1) == [2]", "[<object>] == [2] is false in"),
    "own message": ("def f(x): return 3", "assert f(1) == 2, 'too large'", "AssertionError: too large in"),
    "evaluated once": (
        "n = 0\ndef f(x):\n    global n\n    n += 1\n    return n",
        "assert f(1) == 2",
        "1 == 2 is false in",
    ),
}
"""For each case a program, its test, and a part of the message."""


@pytest.fixture(scope="module")
def judged() -> Iterator[Callable[[str], Verdict]]:
    """The verdict on a case, from a server at any isolation level."""
    with JudgeClient(judge_config(num_workers=2)) as server:
        cases = {**CASES, **MESSAGES}
        yield submit_all(server, {name: (function(*case[:2]), LIMITS) for name, case in cases.items()})


@pytest.mark.parametrize("name", MESSAGES)
def test_failed_comparison_shows_both_values(judged: Callable[[str], Verdict], name: str) -> None:
    verdict = judged(name)
    assert verdict.error_type == "wrong_answer" and MESSAGES[name][2] in verdict.message, verdict.message


@pytest.mark.parametrize("name", CASES)
def test_objects_behave_as_in_same_process_or_fail_test(judged: Callable[[str], Verdict], name: str) -> None:
    """Each case has one test, which passes or fails as listed."""
    verdict = judged(name)
    assert (verdict.error_type == "success") == CASES[name][2], verdict.message
    assert verdict.error_type in ("success", "wrong_answer", "runtime_error")
