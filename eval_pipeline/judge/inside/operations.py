"""What one side may ask of an object on the other."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any


def _multiplied_by(value: Any, other: Any) -> Any:
    return other * value


def _run(coroutine: Any) -> Any:
    import asyncio

    return asyncio.run(coroutine)


def _enter(value: Any) -> Any:
    return type(value).__enter__(value)


def _exit(value: Any, error: BaseException | None) -> Any:
    return type(value).__exit__(value, *(None, None, None) if error is None else (type(error), error, None))


def _throw(value: Any, error: BaseException) -> Any:
    return value.throw(error)


_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "xor")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

OF_A_TEST: dict[str, Callable[..., Any]] = {
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "hash": hash,
    "getitem": operator.getitem,
    **{name: vars(operator)[name] for name in _COMPARISONS},
    **{"isinstance": isinstance, "enter": _enter, "exit": _exit},
}
"""An answer may use what a test passes, and not look inside: a function's globals hold the test."""

OF_TEST_INSTANCES: dict[str, Callable[..., Any]] = {
    **{name: vars(operator)[name] for name in (*_BINARY, "neg", "pos", "abs", "invert", "index")},
    **{"and": operator.and_, "or": operator.or_, "divmod": divmod, "setitem": operator.setitem},
    **{"delitem": operator.delitem, "int": int, "float": float, "complex": complex, "reversed": reversed},
    **{"round": round, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil, "format": format},
    "rmul": _multiplied_by,
}
"""Beside these, what an answer may do with an instance of a class that the test defines."""

TAKE_AN_ERROR = frozenset(("exit", "throw"))
"""These are sent with the description of an exception, and done with the exception."""

OF_AN_ANSWER: dict[str, Callable[..., Any]] = {
    **OF_A_TEST,
    **OF_TEST_INSTANCES,
    **{"getattr": getattr, "setattr": setattr, "delattr": delattr, "throw": _throw, "run": _run},
}
"""A test may do anything with what an answer defines."""

CHANGES = frozenset(
    ("call", "run", "next", "throw", "setattr", "delattr", "setitem", "delitem", "enter", "exit", "iter", "reversed")
)
"""What may change an object."""
CONVERSIONS = frozenset({*OF_A_TEST, *OF_TEST_INSTANCES} - CHANGES)
"""What gives the same value again, as long as nothing is done to the object. An attribute may be a clock's."""
