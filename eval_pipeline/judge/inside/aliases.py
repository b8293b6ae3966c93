"""Preserves the identity of objects: a call may change its arguments, and return them or parts of them.

Both sides number the mutable containers in the arguments of a call in the same order. The answer sends them back with
the result, in one message, which preserves identity within it; the test then replaces them with its own objects.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from values import is_array, update_array

_ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None)))
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
    return [part for part in _walk(value) if isinstance(part, _MUTABLE) or is_array(part)]


def contains_any(value: Any, containers: list[Any]) -> bool:
    """Whether one of these very objects is inside a value, or is the value."""
    wanted = {id(container) for container in containers}
    return bool(wanted) and any(id(part) in wanted for part in _walk(value))


def _walk(value: Any) -> Iterator[Any]:
    """Everything inside a value except numbers and text, each object once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if type(part) in _ATOMS or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if (parts := _parts(part)) is not None and not _ATOMS.issuperset(map(type, parts(part))):
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
        ValueError: the new containers are not of the kinds of the old ones.
    """
    if type(new) is not list or [_kind(part) for part in old] != [_kind(part) for part in new]:
        raise ValueError("other containers came back than were sent")
    known = {id(after): before for before, after in zip(old, new)}
    replaced = _Replacing(known)
    for before, after in zip(old, new):
        _fill(before, after, replaced)
    return replaced(value)


def _kind(value: Any) -> Any:
    return next((kind for kind in _MUTABLE if isinstance(value, kind)), "array" if is_array(value) else None)


def _fill(old: Any, new: Any, replaced: Callable[[Any], Any]) -> None:
    content: Any
    if is_array(old):
        update_array(old, new)
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
    """Replaces received objects with the known objects that they stand for.

    Args:
        known: by the id of the received object.
    """

    def __init__(self, known: dict[int, Any]) -> None:
        self._done = dict(known)
        self._kept: list[Any] = []

    def __call__(self, value: Any) -> Any:
        """The value with everything in it replaced."""
        if type(value) in _ATOMS:
            return value
        if id(value) in self._done:
            return self._done[id(value)]
        parts = _parts(value)
        if parts is None or _ATOMS.issuperset(map(type, parts(value))):
            return value
        self._kept.append(value)  # alive, so that its id stays its own
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
