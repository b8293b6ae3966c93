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


def _exit(value: Any, *error: Any) -> Any:
    return type(value).__exit__(value, *error)


_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "xor")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

OF_A_TEST: dict[str, Callable[..., Any]] = {
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "getitem": operator.getitem,
}
"""An answer may use what a test passes, and not look inside: a function's globals hold the test."""

OF_AN_ANSWER: dict[str, Callable[..., Any]] = {
    **OF_A_TEST,
    **{name: vars(operator)[name] for name in (*_BINARY, *_COMPARISONS, "neg", "pos", "abs", "invert", "index")},
    **{"and": operator.and_, "or": operator.or_, "divmod": divmod, "setitem": operator.setitem},
    **{"delitem": operator.delitem, "getattr": getattr, "setattr": setattr, "delattr": delattr},
    **{"hash": hash, "int": int, "float": float, "complex": complex, "reversed": reversed, "round": round},
    **{"trunc": math.trunc, "floor": math.floor, "ceil": math.ceil, "format": format, "isinstance": isinstance},
    **{"enter": _enter, "exit": _exit, "rmul": _multiplied_by, "run": _run},
}
"""A test may do anything with what an answer defines."""
