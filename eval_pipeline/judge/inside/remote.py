"""An object that lives on the other side.

No value of the test may reach the answer but through the arguments of a call that the test makes, and no comparison
with such a value may be decided by the answer. So comparison and arithmetic are forwarded between two remote objects
only (but for a product with a number that is again a remote object), membership is decided here by iterating, and a
remote object equals no plain value.
"""

from __future__ import annotations

import functools
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
    """Which of the optional special methods a class has, as bits; a stand-in for its objects has just these."""
    return sum(1 << bit for bit, name in enumerate(_OPTIONAL) if _defines(kind, f"__{name}__"))


def _defines(kind: type, name: str) -> bool:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None) is not None


class Remote:
    """Forwards what Python does with it to the other side."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Any, number: int) -> None:
        """The object that the side behind `peer` knows by `number`."""
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
        """Whether an object that lives there too is an instance of this class."""
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
