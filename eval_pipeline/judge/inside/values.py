"""Sends values between an answer and its test, so that the test receives only plain values from the answer.

Values are pickled, which preserves aliases and is fast, but the test's side accepts only a short list of globals. Each
of them is an immutable type defined in C, or a function below: if a class written in Python were on the list, pickle's
BUILD could give that class an `__eq__` that is always true.

A call may change its arguments, and return them or parts of them. So both sides number the mutable containers in the
arguments in the same order. The answer sends them back together with the result, in one message, which preserves
identity; the test then replaces them with its own objects.
"""

from __future__ import annotations

import builtins
import functools
import io
import pickle
import pickletools
import re
import sys
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from keyword import iskeyword
from typing import Any, NamedTuple

PROTOCOL = 5
UNCHANGEABLE = frozenset((bool, int, float, complex, str, bytes, type(None)))
"""Types of arguments that a call cannot change."""
_HEAP_TYPE = 1 << 9


class Handle(NamedTuple):
    """Names an object that stays on one side. Like the next two classes, it is replaced while a message is read."""

    number: int
    of_sender: bool
    shape: int = 0
    """Which special methods its class has (`remote.shape_of`)."""


class ErrorClass(NamedTuple):
    """Names an exception class of the sender."""

    rows: list[tuple[int, str, list[Any]]]
    """What `remote.rows_of` returns for the class."""


class Coroutine(NamedTuple):
    """Names a coroutine of the sender."""

    number: int


Name = Handle | ErrorClass | Coroutine
_NAMES = (Handle, ErrorClass, Coroutine)


def keys_view(keys: list[Any]) -> KeysView[Any]:
    """A `dict.keys()` with these keys."""
    return dict.fromkeys(keys).keys()


def items_view(items: list[tuple[Any, Any]]) -> ItemsView[Any, Any]:
    """A `dict.items()` with these items."""
    return dict(items).items()


def values_view(values: list[Any]) -> ValuesView[Any]:
    """A `dict.values()` with these values."""
    return dict(enumerate(values)).values()


def fraction(numerator: int, denominator: int) -> Fraction:
    """A `Fraction` of two integers."""
    return Fraction(int(numerator), int(denominator))


def counter(items: dict[Any, int]) -> Counter[Any]:
    """A `Counter` with these counts."""
    result: Counter[Any] = Counter()
    dict.update(result, items)
    return result


def named_tuple(name: str, fields: tuple[str, ...], items: tuple[Any, ...]) -> tuple[Any, ...]:
    """A tuple of a class that `collections.namedtuple` creates from this name and these fields."""
    return _named_tuple_class(name, tuple(fields))(*items)


@functools.cache
def _named_tuple_class(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)


def typed_array(kind: str, data: bytes) -> array:
    """An `array.array`."""
    return array(kind, data)


# NumPy's arrays and numbers are sent as bytes, from which the reader's NumPy rebuilds them
_PLAIN_ELEMENTS = re.compile(r"[<>|=][biufcSUmM]\d+(\[\w+\])?")
"""Element types that are plain bytes; others hold objects or code."""


def _reduced_array(value: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """How to send an array or a number; None for anything else, and for an array that cannot be sent."""
    numpy = sys.modules.get("numpy")
    if (
        numpy is None
        or not isinstance(value, (numpy.ndarray, numpy.generic))
        or not _PLAIN_ELEMENTS.fullmatch(value.dtype.str)
    ):
        return None
    rebuild = numpy_array if isinstance(value, numpy.ndarray) else numpy_scalar
    return rebuild, (value.dtype.str, value.shape, value.tobytes())


def numpy_array(kind: str, shape: tuple[int, ...], data: bytes) -> Any:
    """An array of this type and shape, in C order.

    Raises:
        ValueError: the type is not plain bytes, or the data does not have that size.
    """
    import numpy

    if not _PLAIN_ELEMENTS.fullmatch(kind):
        raise ValueError(f"an array of {kind}")
    element = numpy.dtype(kind)
    if element.itemsize == 0:  # an empty text, which `frombuffer` refuses
        return numpy.zeros(shape, element)
    return numpy.frombuffer(data, element).reshape(shape).copy()


def numpy_scalar(kind: str, shape: tuple[int, ...], data: bytes) -> Any:
    """A number of this type.

    Raises:
        ValueError: see `numpy_array`.
    """
    return numpy_array(kind, shape, data)[()]


def _is_array(value: Any) -> bool:
    """Whether a value is an array that can be sent."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and _PLAIN_ELEMENTS.fullmatch(value.dtype.str) is not None


_VIEWS: dict[type, Callable[[list[Any]], Any]] = {
    type({}.keys()): keys_view,
    type({}.items()): items_view,
    type({}.values()): values_view,
}
_C_TYPES = (
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice),
    *(Decimal, deque, OrderedDict, defaultdict, date, datetime, time, timedelta, timezone),
)
_KNOWN: dict[tuple[str, str], Any] = {(kind.__module__, kind.__qualname__): kind for kind in _C_TYPES}
_KNOWN |= {(Decimal.__reduce__(Decimal(0))[0].__module__, "Decimal"): Decimal}
_KNOWN |= {("builtins", "Ellipsis"): ..., ("builtins", "NotImplemented"): NotImplemented}
_KNOWN |= {
    ("builtins", name): kind
    for name, kind in vars(builtins).items()
    # if a class that catches the test's own assertions had a name, an answer could undo them
    if isinstance(kind, type) and issubclass(kind, BaseException) and not issubclass(AssertionError, kind)
    # ExceptionGroup can be changed
    if not kind.__flags__ & _HEAP_TYPE
}
_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(keys_view, items_view, values_view, fraction, counter, named_tuple, typed_array),
    *(numpy_array, numpy_scalar),
)
_KNOWN |= {(function.__module__, function.__qualname__): function for function in _FUNCTIONS}
_PLAIN = frozenset((*_C_TYPES, type(...), type(NotImplemented)))
# converts an instance of a subclass to its base class for sending, without calling any method of the subclass
_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__pos__),
    (float, float.__pos__),
    (complex, complex.__pos__),
    (str, str.__str__),
    (bytes, lambda value: bytes.__getitem__(value, slice(None))),
    (bytearray, lambda value: bytearray.__getitem__(value, slice(None))),
    (tuple, lambda value: tuple.__getitem__(value, slice(None))),
    (list, list.copy),
    (OrderedDict, lambda value: list(OrderedDict.items(value))),
    (dict, lambda value: dict(dict.items(value))),
    (set, lambda value: {*set.__iter__(value)}),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
    (deque, lambda value: deque(deque.__iter__(value), value.maxlen)),
)
_FUNCTION_TYPES = (type, types.FunctionType, types.BuiltinFunctionType)


class Writer(pickle.Pickler):
    """Writes a message.

    Args:
        export: returns a name for a value that cannot be sent itself.
        trusted: whether functions and classes of the standard library are sent by name.
    """

    def __init__(self, file: io.BytesIO, export: Callable[[Any], Name], trusted: bool) -> None:
        super().__init__(file, PROTOCOL)
        self._export = export
        self._trusted = trusted

    def reducer_override(self, value: Any) -> Any:
        """Called by pickle for everything except exact builtin containers and scalars."""
        kind = type(value)
        if kind in _PLAIN or self._goes_by_name(value):
            return NotImplemented
        if kind in _VIEWS:
            return _VIEWS[kind], (list(value),)
        if (reduced := _reduced(kind, value)) is not None:
            return reduced
        for base, plain in _BASES:
            if issubclass(kind, base):
                return base, (plain(value),)
        name = self._export(value)
        return type(name), tuple(name)

    def _goes_by_name(self, value: Any) -> bool:
        if not isinstance(value, _FUNCTION_TYPES):
            return False
        if any(value is name for name in _NAMES):
            return True
        module, name = value.__module__, value.__qualname__
        if _KNOWN.get((module, name)) is value:
            return True
        return self._trusted and module in sys.stdlib_module_names and vars(sys.modules[module]).get(name) is value


def _reduced(kind: type, value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """How to send instances of classes of the standard library and NumPy that are not plain subclasses of a builtin."""
    if issubclass(kind, Fraction):
        return fraction, (value.numerator, value.denominator)
    if issubclass(kind, Counter):
        return counter, (dict(dict.items(value)),)
    if issubclass(kind, defaultdict):
        return defaultdict, (value.default_factory, dict(dict.items(value)))
    if kind is array:
        return typed_array, (value.typecode, value.tobytes())
    if issubclass(kind, tuple) and (fields := _fields_of(kind, value)) is not None:
        return named_tuple, (kind.__name__, fields, tuple.__getitem__(value, slice(None)))
    return _reduced_array(value)


def _fields_of(kind: type, value: Any) -> tuple[str, ...] | None:
    """The fields of a class that `named_tuple` could create; None for any other class."""
    fields = getattr(kind, "_fields", None)
    are_names = (
        type(fields) is tuple
        and len(fields) == tuple.__len__(value)
        and all(type(field) is str and field.isidentifier() and not iskeyword(field) for field in fields)
        and len({*fields}) == len(fields)
        and not any(field.startswith("_") for field in fields)
    )
    return fields if are_names else None


class Reader(pickle.Unpickler):
    """Reads a message that an untrusted side wrote; only `read` performs all checks.

    Args:
        resolve: returns the object that a `Handle`, `ErrorClass` or `Coroutine` names.
    """

    def __init__(self, data: bytes, resolve: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(io.BytesIO(data))
        self._data = data
        self._resolve = resolve
        self._changeable = False

    def read(self) -> Any:
        """The value.

        Raises:
            Exception: the message is malformed; can be of any class.
        """
        value = self.load()
        # checked afterwards: a caller that gets this error no longer uses anything that the message may have changed
        if self._changeable and b"b" in self._data and _sets_attributes(self._data):
            raise pickle.UnpicklingError("a message may not set attributes")
        return value

    def find_class(self, module: str, name: str) -> Any:
        """Called for every global that a message names.

        Raises:
            pickle.UnpicklingError: it is not on the list.
        """
        if module == __name__ and name in self._resolve:
            self._changeable = True
            return self._resolve[name]
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} may not be named")
        known = _KNOWN[module, name]
        self._changeable |= isinstance(known, types.FunctionType)
        return known


def _sets_attributes(data: bytes) -> bool:
    return any(operation.name == "BUILD" for operation, _, _ in pickletools.genops(data))


class TrustingReader(Reader):
    """Reads a message of the test, which may name anything importable."""

    def find_class(self, module: str, name: str) -> Any:
        """Called for every global that a message names."""
        if module == __name__ and name in self._resolve:
            return self._resolve[name]
        return pickle.Unpickler.find_class(self, module, name)


# The identity of mutable containers

_MUTABLE = (list, dict, set, deque, bytearray, array)
# how to iterate over one without calling any method of a subclass
_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    list: list.__iter__,
    tuple: tuple.__iter__,
    OrderedDict: OrderedDict.values,
    dict: dict.values,
    deque: deque.__iter__,
}


def containers_of(value: Any) -> list[Any]:
    """The mutable containers inside a value, each once, in an order that depends only on its structure."""
    return [part for part in _walk(value) if isinstance(part, _MUTABLE) or _is_array(part)]


def contains_any(value: Any, containers: list[Any]) -> bool:
    """Whether a value is or contains one of these containers, by identity."""
    wanted = {id(container) for container in containers}
    return bool(wanted) and any(id(part) in wanted for part in _walk(value))


def _walk(value: Any) -> Iterator[Any]:
    """Everything inside a value except numbers and text, each object once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if type(part) in UNCHANGEABLE or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if (parts := _parts(part)) is not None and not UNCHANGEABLE.issuperset(map(type, parts(part))):
            waiting.extend(parts(part))


def _parts(value: Any) -> Callable[[Any], Iterable[Any]] | None:
    if type(value) in _PARTS:
        return _PARTS[type(value)]
    return next((parts for base, parts in _PARTS.items() if isinstance(value, base)), None)


def restore(value: Any, old: list[Any], new: list[Any]) -> Any:
    """Copy the content of the new containers into the old ones, and replace the new ones with the old ones in a value.

    Args:
        value: received in the same message as `new`; changed in place where possible.
        old: containers that were sent.
        new: the received ones, in the same order.

    Returns:
        The value.

    Raises:
        ValueError: the new containers do not match the old ones in number and kind.
    """
    if type(new) is not list or [_kind(part) for part in old] != [_kind(part) for part in new]:
        raise ValueError("other containers came back than were sent")
    known = {id(after): before for before, after in zip(old, new)}
    replaced = _Replacing(known)
    for before, after in zip(old, new):
        _fill(before, after, replaced)
    return replaced(value)


def _kind(value: Any) -> Any:
    return next((kind for kind in _MUTABLE if isinstance(value, kind)), "array" if _is_array(value) else None)


def _fill(old: Any, new: Any, replaced: Callable[[Any], Any]) -> None:
    content: Any
    if _is_array(old):
        if old.shape == new.shape and old.dtype == new.dtype and old.flags.writeable:
            old[...] = new
    elif isinstance(old, dict):
        content = [(replaced(key), replaced(value)) for key, value in new.items()]
        old.clear()
        for key, value in content:
            old[key] = value
    elif isinstance(old, (set, deque)):
        content = [replaced(part) for part in new]
        old.clear()
        old.extend(content) if isinstance(old, deque) else old.update(content)
    else:
        old[:] = [replaced(part) for part in new] if isinstance(old, list) else new


class _Replacing:
    """Replaces received objects with the objects that they stand for, given by the ids of the received ones."""

    def __init__(self, known: dict[int, Any]) -> None:
        self._done = dict(known)
        self._kept: list[Any] = []

    def __call__(self, value: Any) -> Any:
        """The value with everything in it replaced."""
        if type(value) in UNCHANGEABLE:
            return value
        if id(value) in self._done:
            return self._done[id(value)]
        parts = _parts(value)
        if parts is None or UNCHANGEABLE.issuperset(map(type, parts(value))):
            return value
        self._kept.append(value)  # kept alive, so that no other object gets its id
        self._done[id(value)] = value
        if isinstance(value, tuple):
            self._done[id(value)] = self._tuple(value)
        else:
            _fill(value, value, self)
        return self._done[id(value)]

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        parts = [self(part) for part in tuple.__iter__(value)]
        if all(before is after for before, after in zip(tuple.__iter__(value), parts)):
            return value
        return tuple.__new__(type(value), parts)
