"""Proxies for objects and exceptions of the other side, and the operations that one side may request on the other's.

A value of the test may reach the answer only as an argument of a call that the test makes, and the answer must not
decide a comparison with such a value. So comparison and arithmetic are forwarded only between two remote objects
(except for a product with a number if the product is a remote object too), membership is decided here by iterating, and
a remote object equals no plain value.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
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
    """The optional special methods that a class has, as bits; a proxy for its objects has exactly these."""
    return sum(1 << bit for bit, name in enumerate(_OPTIONAL) if _defines(kind, f"__{name}__"))


def _defines(kind: type, name: str) -> bool:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None) is not None


class RemoteProxy:
    """A proxy that forwards every operation to the other side, which knows the object by its number."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Any, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        """Get the attribute on the other side."""
        if name.startswith("__") and name.endswith("__") and name not in _READABLE_DUNDERS:
            raise AttributeError(name)
        return self._peer.attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute on the other side."""
        self._peer.request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete the attribute on the other side."""
        self._peer.request("delattr", self, name)

    def __instancecheck__(self, value: Any) -> bool:
        """Whether another remote object is an instance of this class."""
        return isinstance(value, RemoteProxy) and self._peer.request("isinstance", value, self)


@functools.lru_cache(maxsize=1000)
def remote_class(shape: int) -> type[RemoteProxy]:
    """The class of proxies for objects of this shape (`shape_of`)."""
    methods = {f"__{name}__": _METHODS[name] for bit, name in enumerate(_OPTIONAL) if shape >> bit & 1}
    return type("RemoteProxy", (RemoteProxy,), {"__slots__": (), "__doc__": property(_doc), **methods})


def _doc(self: RemoteProxy) -> Any:
    return self._peer.request("getattr", self, "__doc__")


def _call(self: RemoteProxy, *arguments: Any, **named: Any) -> Any:
    return self._peer.call(self, arguments, named)


def _exit(self: RemoteProxy, kind: Any, error: Any, trace: Any) -> Any:
    return self._peer.leave(self, error)


def _forwarding(operation: str) -> Callable[..., Any]:
    def method(self: RemoteProxy, *arguments: Any) -> Any:
        return self._peer.request(operation, self, *arguments)

    return method


def _forwarding_between_remotes(operation: str) -> Callable[..., Any]:
    def method(self: RemoteProxy, other: Any) -> Any:
        if not isinstance(other, RemoteProxy):
            return NotImplemented
        return self._peer.request(operation, self, other)

    return method


def _multiplying(operation: str) -> Callable[..., Any]:
    def method(self: RemoteProxy, other: Any) -> Any:
        if not isinstance(other, RemoteProxy) and type(other) not in (int, float):
            return NotImplemented
        product = self._peer.request(operation, self, other)
        if isinstance(other, RemoteProxy) or isinstance(product, RemoteProxy):
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
    setattr(RemoteProxy, f"__{_name}__", _forwarding(_name))
for _name in _BETWEEN_REMOTES:
    setattr(RemoteProxy, f"__{_name}__", _forwarding_between_remotes(_name))


# Operations that one side may request on an object of the other


def _run_coroutine(coroutine: Any) -> Any:
    import asyncio

    return asyncio.run(coroutine)


def _exit_manager(value: Any, error: BaseException | None) -> Any:
    return type(value).__exit__(value, *(None, None, None) if error is None else (type(error), error, None))


_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "xor")

TEST_OBJECT_OPS: dict[str, Callable[..., Any]] = {
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "hash": hash,
    "getitem": operator.getitem,
    **{name: vars(operator)[name] for name in _BETWEEN_REMOTES},
    **{"isinstance": isinstance, "enter": lambda value: type(value).__enter__(value), "exit": _exit_manager},
}
"""Operations that an answer may request on objects passed by a test.

Attribute access is excluded, because a function's globals expose the test."""

TEST_INSTANCE_OPS: dict[str, Callable[..., Any]] = {
    **{name: vars(operator)[name] for name in (*_OPERATORS, "neg", "pos", "abs", "invert", "index")},
    **{"and": operator.and_, "or": operator.or_, "divmod": divmod, "setitem": operator.setitem},
    **{"delitem": operator.delitem, "int": int, "float": float, "complex": complex, "reversed": reversed},
    **{"round": round, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil, "format": format},
    "rmul": lambda value, other: other * value,
}
"""Further operations of an answer on instances of classes that the test defines."""

TAKE_AN_ERROR = frozenset(("exit", "throw"))
"""Operations that are sent with an exception's description, and performed with the exception itself."""

ANSWER_OBJECT_OPS: dict[str, Callable[..., Any]] = {
    **TEST_OBJECT_OPS,
    **TEST_INSTANCE_OPS,
    **{"getattr": getattr, "setattr": setattr, "delattr": delattr},
    **{"throw": lambda value, error: value.throw(error), "run": _run_coroutine},
}
"""Operations of a test on objects of an answer: anything."""

CHANGES = frozenset(
    ("call", "run", "next", "throw", "setattr", "delattr", "setitem", "delitem", "enter", "exit", "iter", "reversed")
)
"""Operations that may change an object."""
CONVERSIONS = frozenset({*TEST_OBJECT_OPS, *TEST_INSTANCE_OPS} - CHANGES)
"""Operations that return the same value until the object changes. Attributes are excluded, because one may be a clock.
"""


# Exceptions of an answer, as its test sees them: they keep their classes, but never pass for assertions of the test

Row = tuple[int, str, list[Any]]
"""One class of an answer: its number, its name, and its bases, each the number of a row before it or a known name."""


class AnswerException(BaseException):
    """Marks an assertion that the answer raised, and every exception of a class that the answer defines."""

    def __getattr__(self, name: str) -> Any:
        """An attribute of the exception on the answer's side."""
        original = vars(self).get("original")
        if original is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(original, name)


def is_of_test(error: Any) -> bool:
    """Whether this is a failed assertion of the test itself."""
    return isinstance(error, AssertionError) and not isinstance(error, AnswerException)


_CONTROL_FLOW = frozenset(
    (
        *("builtins:StopIteration", "builtins:StopAsyncIteration", "builtins:GeneratorExit", "bdb:BdbQuit"),
        *("asyncio.exceptions:CancelledError", "concurrent.futures._base:CancelledError"),
    )
)


def control_flow(error: BaseException) -> type | None:
    """The class, if an exception is one by which Python, asyncio or unittest end or skip something without a failure.

    Returns:
        The exception's class of Python or the standard library; None for any other exception.
    """
    for base in type(error).__mro__:
        name = known_name(base)
        if name in _CONTROL_FLOW or (name is not None and name.startswith("unittest.")):
            return base
    return None


def is_named(kind: type, words: frozenset[str]) -> bool:
    """Whether one of these words is a name of an exception class of Python or the standard library.

    It may be an alias in a module that the words name, too, such as `socket.timeout`. An answer's class has any name
    that the answer likes.
    """
    if known_name(kind) is None:
        return False
    modules = [sys.modules[name] for name in (kind.__module__, *words) if name in sys.modules]
    return any(vars(module).get(word) is kind for module in modules for word in words)


def description_of(error: BaseException | None) -> tuple[Any, ...]:
    """What to send of an exception to the side that handles it: its class, its arguments, and the original there.

    The answer must not see the message of a failed assertion of the test.
    """
    if error is None:
        return (None,)
    arguments = () if is_of_test(error) else error.args
    return (
        nearest_known(type(error)),
        arguments,
        vars(error).get("original") if isinstance(error, AnswerException) else None,
    )


def error_of_description(kind: str | None, arguments: tuple[Any, ...] = (), original: Any = None) -> Any:
    """Inverse of `description_of`: the exception, a similar one, or None."""
    if kind is None or original is not None:
        return original
    try:
        return known_class(kind)(*arguments)
    except (TypeError, ValueError):  # its module is not imported here, or it takes other arguments
        return Exception(*arguments)


def known_name(kind: type) -> str | None:
    """The name that both sides use for an exception class of Python or the standard library; None for other classes."""
    module = kind.__module__
    if _is_standard(module) and vars(sys.modules[module]).get(kind.__qualname__) is kind:
        return f"{module}:{kind.__qualname__}"
    return None


def nearest_known(kind: type) -> str:
    """The first known name among a class and its bases."""
    return next((name for base in kind.__mro__ if (name := known_name(base)) is not None), "builtins:BaseException")


def known_class(name: Any) -> type:
    """The exception class of this name.

    Raises:
        ValueError: there is no such class.
    """
    module, _, attribute = name.partition(":") if type(name) is str else ("", "", "")
    kind = vars(sys.modules[module]).get(attribute) if _is_standard(module) else None
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise ValueError("not the name of an exception")
    return kind


def rows_of(kind: type, number_of: Callable[[Any], int]) -> list[Row]:
    """The classes that an answer defines among an exception class and its bases; the last row is the class itself."""
    own = [base for base in reversed(kind.__mro__) if issubclass(base, BaseException) and known_name(base) is None]
    return [(number_of(base), base.__name__, [_base(part, number_of) for part in base.__bases__]) for base in own]


def _base(kind: type, number_of: Callable[[Any], int]) -> Any:
    return nearest_known(kind) if not issubclass(kind, BaseException) else known_name(kind) or number_of(kind)


def _is_standard(module: Any) -> bool:
    return type(module) is str and module.split(".")[0] in sys.stdlib_module_names and module in sys.modules


class AnswerExceptionClasses:
    """The test's proxies for an answer's exception classes. Catching one never catches an assertion of the test."""

    def __init__(self) -> None:
        self._by_number: dict[int, type] = {}
        self._by_name: dict[str, type] = {}
        self._numbers: dict[type, int] = {}

    def number_of(self, value: Any) -> int | None:
        """The number of the class that a proxy represents."""
        return self._numbers.get(value) if isinstance(value, type) else None

    def of_rows(self, rows: Any) -> type:
        """The proxy for the last class of `rows_of`.

        Raises:
            ValueError, TypeError, LookupError: the rows are malformed.
        """
        for number, name, bases in rows:
            if type(number) is not int or type(name) is not str:
                raise ValueError("no class")
            if number not in self._by_number:
                parents = tuple(map(self._base, bases))
                marked = any(issubclass(parent, AnswerException) for parent in parents)
                kind = type(name, parents if marked else (AnswerException, *parents), {"__str__": _text})
                self._by_number[number], self._numbers[kind] = kind, number
        return self._by_number[rows[-1][0]]

    def of_name(self, name: Any) -> type:
        """A known class; for assertions, a proxy that does not pass for a failure of the test.

        Raises:
            ValueError, TypeError: there is no such class.
        """
        if name not in self._by_name:
            known = known_class(name)
            own = issubclass(known, AssertionError)
            self._by_name[name] = type(known.__name__, (AnswerException, known), {}) if own else known
        return self._by_name[name]

    def _base(self, base: Any) -> type:
        return self._by_number[base] if type(base) is int else self.of_name(base)


def _text(error: AnswerException) -> str:
    original = vars(error).get("original")
    return BaseException.__str__(error) if original is None else str(original)
