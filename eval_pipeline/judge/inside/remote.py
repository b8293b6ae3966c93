"""Objects that live on the other side, and what one side may ask of an object on the other.

No value of the test may reach the answer except through the arguments of a call that the test makes, and no comparison
with such a value may be decided by the answer. So comparison and arithmetic are forwarded only between two remote
objects (except for a product with a number that is again a remote object), membership is decided here by iterating, and
a remote object equals no plain value.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

_ALWAYS = ("bool", "str", "repr", "hash", "format")
_BETWEEN_REMOTES = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY = (
    *("iter", "next", "len", "int", "float", "complex", "index"),
    *("neg", "pos", "abs", "invert", "reversed", "trunc", "floor", "ceil", "enter"),
)
_BINARY = (
    *("add", "sub", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("lshift", "rshift", "and", "or", "xor"),
)
_WITH_ARGUMENTS = ("getitem", "setitem", "delitem", "round")
_WITH_A_NUMBER = ("mul", "rmul")
_OPTIONAL = ("call", "exit", *_UNARY, *_BINARY, *_WITH_ARGUMENTS, *_WITH_A_NUMBER)
_READABLE_DUNDERS = frozenset(("__name__", "__qualname__"))


@functools.cache
def shape_of(kind: type) -> int:
    """The optional special methods that a class has, as bits; a stand-in for its objects has exactly these."""
    return sum(1 << bit for bit, name in enumerate(_OPTIONAL) if _defines(kind, f"__{name}__"))


def _defines(kind: type, name: str) -> bool:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None) is not None


class Remote:
    """A stand-in that forwards what Python does with it to the other side.

    Args:
        peer: this end of the conversation.
        number: by which the other side knows the object.
    """

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Any, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        """An attribute that it has there."""
        if name.startswith("__") and name.endswith("__") and name not in _READABLE_DUNDERS:
            raise AttributeError(name)
        return self._peer.attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set it there."""
        self._peer.request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete it there."""
        self._peer.request("delattr", self, name)

    def __instancecheck__(self, value: Any) -> bool:
        """Whether another remote object is an instance of this class."""
        return isinstance(value, Remote) and self._peer.request("isinstance", value, self)


@functools.lru_cache(maxsize=1000)
def remote_class(shape: int) -> type[Remote]:
    """The class of stand-ins for objects of this shape (`shape_of`)."""
    methods = {f"__{name}__": _METHODS[name] for bit, name in enumerate(_OPTIONAL) if shape >> bit & 1}
    return type("Remote", (Remote,), {"__slots__": (), "__doc__": property(_doc), **methods})


def _doc(self: Remote) -> Any:
    return self._peer.request("getattr", self, "__doc__")


def _call(self: Remote, *arguments: Any, **named: Any) -> Any:
    return self._peer.call(self, arguments, named)


def _exit(self: Remote, kind: Any, error: Any, trace: Any) -> Any:
    return self._peer.leave(self, error)


def _forwarding(operation: str) -> Callable[..., Any]:
    def method(self: Remote, *arguments: Any) -> Any:
        return self._peer.request(operation, self, *arguments)

    return method


def _forwarding_between_remotes(operation: str) -> Callable[..., Any]:
    def method(self: Remote, other: Any) -> Any:
        if not isinstance(other, Remote):
            return NotImplemented
        return self._peer.request(operation, self, other)

    return method


def _multiplying(operation: str) -> Callable[..., Any]:
    def method(self: Remote, other: Any) -> Any:
        if not isinstance(other, Remote) and type(other) not in (int, float):
            return NotImplemented
        product = self._peer.request(operation, self, other)
        if isinstance(other, Remote) or isinstance(product, Remote):
            return product
        raise TypeError("what an answer makes of its object and a number of the test must be an object again")

    return method


_METHODS: dict[str, Callable[..., Any]] = {
    "call": _call,
    "exit": _exit,
    **{name: _forwarding(name) for name in (*_UNARY, *_WITH_ARGUMENTS)},
    **{name: _forwarding_between_remotes(name) for name in _BINARY},
    **{name: _multiplying(name) for name in _WITH_A_NUMBER},
}
for _name in _ALWAYS:
    setattr(Remote, f"__{_name}__", _forwarding(_name))
for _name in _BETWEEN_REMOTES:
    setattr(Remote, f"__{_name}__", _forwarding_between_remotes(_name))


# What one side may ask of an object on the other


def _multiplied_by(value: Any, other: Any) -> Any:
    return other * value


def _run_coroutine(coroutine: Any) -> Any:
    import asyncio

    return asyncio.run(coroutine)


def _enter_manager(value: Any) -> Any:
    return type(value).__enter__(value)


def _exit_manager(value: Any, error: BaseException | None) -> Any:
    return type(value).__exit__(value, *(None, None, None) if error is None else (type(error), error, None))


def _throw(value: Any, error: BaseException) -> Any:
    return value.throw(error)


_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "xor")
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
    **{"isinstance": isinstance, "enter": _enter_manager, "exit": _exit_manager},
}
"""An answer may use what a test passes, but not inspect it: the globals of a function hold the test."""

OF_TEST_INSTANCES: dict[str, Callable[..., Any]] = {
    **{name: vars(operator)[name] for name in (*_OPERATORS, "neg", "pos", "abs", "invert", "index")},
    **{"and": operator.and_, "or": operator.or_, "divmod": divmod, "setitem": operator.setitem},
    **{"delitem": operator.delitem, "int": int, "float": float, "complex": complex, "reversed": reversed},
    **{"round": round, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil, "format": format},
    "rmul": _multiplied_by,
}
"""What an answer may also do with an instance of a class that the test defines."""

TAKE_AN_ERROR = frozenset(("exit", "throw"))
"""Operations that are sent with the description of an exception, and performed with the exception."""

OF_AN_ANSWER: dict[str, Callable[..., Any]] = {
    **OF_A_TEST,
    **OF_TEST_INSTANCES,
    **{"getattr": getattr, "setattr": setattr, "delattr": delattr, "throw": _throw, "run": _run_coroutine},
}
"""A test may do anything with what an answer defines."""

CHANGES = frozenset(
    ("call", "run", "next", "throw", "setattr", "delattr", "setitem", "delitem", "enter", "exit", "iter", "reversed")
)
"""Operations that may change an object."""
CONVERSIONS = frozenset({*OF_A_TEST, *OF_TEST_INSTANCES} - CHANGES)
"""Operations that give the same value again until the object changes. An attribute may be a clock's."""
