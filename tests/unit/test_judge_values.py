"""Which values pass between an answer and its test, and which do not."""

from __future__ import annotations

import enum
import io
import pickle
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

INSIDE = Path(__file__).resolve().parents[2] / "eval_pipeline" / "judge" / "inside"
sys.path.insert(0, str(INSIDE))
import values  # noqa: E402  the modules of that folder import each other as they do inside a sandbox

sys.path.remove(str(INSIDE))


def refuse(*_: Any) -> Any:
    """Reject any object that would need a handle."""
    raise AssertionError("it became a handle")


NOTHING = dict.fromkeys(("Handle", "ErrorClass", "Coroutine"), refuse)


def sent(value: Any) -> Any:
    """A value of the answer as it arrives at the test."""
    file = io.BytesIO()
    values.Writer(file, refuse, trusted=False).dump(value)
    return values.Reader(file.getvalue(), NOTHING).read()


class Color(enum.IntEnum):
    """An int subclass."""

    RED = 3


class Text(str):
    """A string that claims to equal everything."""

    def __eq__(self, other: object) -> bool:
        """To everything."""
        return True

    __hash__ = str.__hash__

    def __str__(self) -> str:
        """Here too."""
        return "lie"


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        ([1, 2.5, "é\ud800", b"x", None, True, (1, {2: {3}})],) * 2,
        (float("inf"), float("inf")),
        (-0.0, -0.0),
        (10**4000,) * 2,
        (1 + 2j,) * 2,
        (range(3),) * 2,
        (frozenset({1}),) * 2,
        (Decimal("1.10"),) * 2,
        (Fraction(1, 3),) * 2,
        (deque([1], 3),) * 2,
        (date(2020, 1, 2),) * 2,
        (datetime(2020, 1, 2, tzinfo=UTC),) * 2,
        (timedelta(1),) * 2,
        (bytearray(b"x"),) * 2,
        (..., ...),
        (int, int),
        (Color.RED, 3),
        (Text("x"), "x"),
        (Pair(1, 2), Pair(1, 2)),
        (Counter("aab"),) * 2,
        (OrderedDict(a=1),) * 2,
        (defaultdict(list, a=[1]),) * 2,
        (array("d", [1.5]),) * 2,
        (ValueError, ValueError),
        ({Color.RED: Text("x")}, {3: "x"}),
        ({1: 2}.keys(), {1: 2}.keys()),
        ({1: 2}.items(), {1: 2}.items()),
    ],
)
def test_plain_values_arrive_unchanged(value: Any, arrives: Any) -> None:
    """Subclasses arrive as their builtin type."""
    result = sent(value)
    assert result == arrives and arrives == result
    assert type(result) is type(arrives) or type(result)._fields == type(arrives)._fields
    assert repr(result) == repr(arrives)


def test_empty_numpy_strings_arrive() -> None:
    """Their elements have size zero."""
    for value in (np.str_(""), np.bytes_(b""), np.array(""), np.array(["", ""]), np.array([], dtype="U")):
        result = sent(value)
        assert type(result) is type(value) and result.shape == value.shape and np.array_equal(result, value)
    for kind in ("U0", "S0"):
        result = sent(np.ndarray((2, 3), np.dtype(kind), buffer=b""))
        assert result.shape == (2, 3) and result.dtype.kind == kind[0] and not any(result.flat)


def test_aliases_are_preserved() -> None:
    """A list that occurs in two places arrives as one object."""
    row = [0]
    result = sent([row, row])
    assert result[0] is result[1]


@pytest.mark.parametrize(
    "value", [object(), len, lambda: 0, (x for x in "a"), Path, Path("x"), sys, type, ValueError(), Exception]
)
def test_other_objects_arrive_as_handles(value: Any) -> None:
    with pytest.raises(AssertionError, match="handle"):
        sent(value)


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "builtins.eval",
        "builtins.getattr",
        "builtins.type",
        "builtins.object",
        "values.Writer",
        "copyreg._reconstructor",
        "functools.partial",
        "operator.attrgetter",
        "fractions.Fraction",
        "collections.Counter",
        "builtins.AssertionError",
        "builtins.Exception",
        "builtins.int.real",
    ],
)
def test_rejects_unlisted_global_names(name: str) -> None:
    module, _, attribute = name.partition(".")
    message = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, attribute)) + b"\x93."
    with pytest.raises(pickle.UnpicklingError, match="may not be named"):
        values.Reader(message, NOTHING).read()


def test_rejects_messages_that_set_attributes() -> None:
    """Attributes of Python objects cannot be set; a message that merely contains the opcode's bytes is accepted."""
    for text in (b"bbb", b"no"):
        made = b"\x80\x04cvalues\nfraction\n(K\x01K\x02tR" + b"C" + bytes([len(text)]) + text + b"\x86."
        assert values.Reader(made, NOTHING).read() == (Fraction(1, 2), text)
    changed = b"\x80\x04cvalues\nfraction\n(K\x01K\x02tR(N}X\x0a\x00\x00\x00_numeratorK\x07sK\x00\x86tb."
    with pytest.raises(pickle.UnpicklingError, match="set attributes"):
        values.Reader(changed.replace(b"K\x00\x86tb", b"tb"), NOTHING).read()


def test_listed_classes_are_immutable() -> None:
    """Otherwise pickle's BUILD could give one an `__eq__` that is always true."""
    known = values._KNOWN.values()
    types = [value for value in known if isinstance(value, type)]
    assert len(types) > 10
    for kind in types:
        with pytest.raises(TypeError):
            kind.__eq__ = lambda self, other: True


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([3, 1, 2], [1, 2, 3]),
        ([1, 2, 3], []),
        ({1, 2}, {3}),
        (bytearray(b"abc"), bytearray(b"c")),
        (array("i", [1]), array("i", [2, 3])),
        (deque([1, 2]), deque([2])),
        ({"a": 1, "b": 2}, {"b": 1, "a": 3}),
        (Counter("ab"), Counter("b")),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    ],
)
def test_arguments_are_updated_in_place(old: Any, new: Any) -> None:
    """The object keeps its identity and gets the new content."""
    assert values.restore(None, [old], [new]) is None
    assert old == new


def test_object_identity_survives_round_trip() -> None:
    """A result that contains a row of an argument, moved by the answer, contains the test's own row."""
    row, other = [1, 2], [3]
    matrix = [row, other]
    old = values.containers_of(((matrix,), {}))
    theirs = pickle.loads(pickle.dumps(matrix))
    new = values.containers_of(((theirs,), {}))
    result, expected = (theirs[0], {"last": theirs[1]}, [9]), row
    theirs.reverse()
    theirs[1].append(7)
    restored = values.restore(result, old, new)
    assert matrix == [[3], [1, 2, 7]] and matrix[1] is row and matrix[0] is other
    assert restored[0] is expected and restored[1]["last"] is other and restored[2] == [9]


@pytest.mark.parametrize("changed", [None, [], [[1], [2]], [{}], ([1],), [1]])
def test_rejects_containers_that_were_not_sent(changed: Any) -> None:
    """An answer can write arbitrary bytes."""
    with pytest.raises(ValueError, match="other containers"):
        values.restore(None, [[1]], changed)
