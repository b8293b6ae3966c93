"""Exceptions of an answer as its test sees them: of the same classes, but never mistaken for the test's assertions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Row = tuple[int, str, list[Any]]
"""One class of an answer: its number, its name, and its bases, each the number of a row before it or a known name."""


class OfAnswer(BaseException):
    """Marks an assertion that the answer raised, and every exception of a class that the answer defines."""

    def __getattr__(self, name: str) -> Any:
        """An attribute of the exception on the answer's side."""
        original = vars(self).get("original")
        if original is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(original, name)


def is_of_test(error: Any) -> bool:
    """Whether this is a failed assertion of the test itself."""
    return isinstance(error, AssertionError) and not isinstance(error, OfAnswer)


def description_of(error: BaseException | None) -> tuple[Any, ...]:
    """How to send an exception to the side that handles it: its class, its arguments, and the original there.

    The message of a failed assertion of the test is not for the answer.
    """
    if error is None:
        return (None,)
    arguments = () if is_of_test(error) else error.args
    return nearest_known(type(error)), arguments, vars(error).get("original") if isinstance(error, OfAnswer) else None


def error_of_description(kind: str | None, arguments: tuple[Any, ...] = (), original: Any = None) -> Any:
    """The argument of `description_of`, a similar exception, or None."""
    if kind is None or original is not None:
        return original
    try:
        return known_class(kind)(*arguments)
    except (TypeError, ValueError):  # its module is not imported here, or it takes other arguments
        return Exception(*arguments)


def known_name(kind: type) -> str | None:
    """The name by which the other side knows an exception class of Python or the standard library."""
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


class ClassesOfAnswer:
    """The test's stand-ins for an answer's exception classes; no `except` for one catches an assertion of the test."""

    def __init__(self) -> None:
        self._by_number: dict[int, type] = {}
        self._by_name: dict[str, type] = {}
        self._numbers: dict[type, int] = {}

    def number_of(self, value: Any) -> int | None:
        """The number of the class that a stand-in represents."""
        return self._numbers.get(value) if isinstance(value, type) else None

    def of_rows(self, rows: Any) -> type:
        """The stand-in for the last class of `rows_of`.

        Raises:
            ValueError, TypeError, LookupError: the rows are malformed.
        """
        for number, name, bases in rows:
            if type(number) is not int or type(name) is not str:
                raise ValueError("no class")
            if number not in self._by_number:
                parents = tuple(map(self._base, bases))
                marked = any(issubclass(parent, OfAnswer) for parent in parents)
                kind = type(name, parents if marked else (OfAnswer, *parents), {"__str__": _text})
                self._by_number[number], self._numbers[kind] = kind, number
        return self._by_number[rows[-1][0]]

    def of_name(self, name: Any) -> type:
        """A known class; for assertions, a stand-in that is not mistaken for a failure of the test.

        Raises:
            ValueError, TypeError: there is no such class.
        """
        if name not in self._by_name:
            known = known_class(name)
            own = issubclass(known, AssertionError)
            self._by_name[name] = type(known.__name__, (OfAnswer, known), {}) if own else known
        return self._by_name[name]

    def _base(self, base: Any) -> type:
        return self._by_number[base] if type(base) is int else self.of_name(base)


def _text(error: OfAnswer) -> str:
    original = vars(error).get("original")
    return BaseException.__str__(error) if original is None else str(original)
