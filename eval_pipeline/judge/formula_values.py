"""Values of formulas: numbers at fixed points, one random number per variable and point.

Sums, products and integer powers are computed exactly, roots and functions in floating point. The size of numbers is
limited, because formulas may be hostile.
"""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, TypeAlias

MAX_BITS = 1 << 15
"""Bits of an exact numerator or denominator; larger numbers become floats, and no value beyond the range of floats."""
MAX_FACTORIAL = 2500
NUM_INTEGERS = 12
NUM_POINTS = 10 + NUM_INTEGERS
ROUNDING = 1e-13
"""Relative error below which a floating-point result is 0."""


class NotAFormula(Exception):
    """The text has a syntax or a meaning that this module does not know."""


Number: TypeAlias = Fraction | float | complex


@dataclass(frozen=True)
class Expression:
    """A number for each point, or None where it is undefined: with the upper signs of `\\pm`, then with the lower."""

    values: tuple[Number | None, ...]
    name: str = ""
    """Set if the expression is nothing but a variable or an applied function, `f(x)`."""
    is_word: bool = False
    """Whether it is a word, which has a value only to be compared."""


@dataclass(frozen=True)
class Collection:
    """Several formulas."""

    kind: str
    """`list`, `set`, `union`, `and` or `or` between inequalities, `:`, `matrix`, `row`, `base`, or the brackets of a
    tuple or interval, such as `[)`."""
    items: tuple[Formula, ...]


@dataclass(frozen=True)
class Relation:
    """`sides[0] operators[0] sides[1] operators[1] …`."""

    operators: tuple[str, ...]
    sides: tuple[Formula, ...]


Formula: TypeAlias = "Expression | Collection | Relation"


def constant(value: Number) -> Expression:
    """The same value at all points."""
    return Expression((value,) * (2 * NUM_POINTS))


def reals_without(points: tuple[Formula, ...]) -> Collection | None:
    """The intervals between real points; None if a point is not a real number."""
    values = [_real(point) for point in points]
    if None in values:
        return None
    ends = sorted({-math.inf, math.inf, *(value for value in values if value is not None)})
    return Collection("union", tuple(Collection("()", (constant(a), constant(b))) for a, b in pairwise(ends)))


def intersection(sets: list[Formula]) -> Formula | None:
    """The intersection of intervals, and of unions of intervals, with real ends; None for other sets."""
    parts = [_intervals(each) for each in sets]
    common: list[_Interval] = [((-math.inf, 0), (math.inf, 0))]
    for intervals in parts:
        if intervals is None:
            return None
        pairs = [(max(a, c), min(b, d)) for (a, b), (c, d) in product(common, intervals)]
        common = [(lower, upper) for lower, upper in pairs if lower <= upper]
    found = tuple(_collection(*interval) for interval in common)
    return found[0] if len(found) == 1 else Collection("union" if found else "set", found)


_Interval: TypeAlias = "tuple[tuple[Fraction | float, int], tuple[Fraction | float, int]]"
"""Both ends; the second number is 1 behind an open lower end and -1 before an open upper end, so that ends compare."""


def _intervals(formula: Formula) -> list[_Interval] | None:
    if not isinstance(formula, Collection):
        return None
    if formula.kind == "union":
        parts = [_intervals(item) for item in formula.items]
        return None if None in parts else [interval for part in parts for interval in part or ()]
    if len(formula.kind) != 2 or len(formula.items) != 2:
        return None
    lower, upper = map(_real, formula.items)
    if lower is None or upper is None:
        return None
    return [((lower, int(formula.kind[0] == "(")), (upper, -int(formula.kind[1] == ")")))]


def _collection(lower: tuple[Fraction | float, int], upper: tuple[Fraction | float, int]) -> Formula:
    if lower == upper:
        return Collection("set", (constant(lower[0]),))
    kind = ("(" if lower[1] or math.isinf(lower[0]) else "[") + (")" if upper[1] or math.isinf(upper[0]) else "]")
    return Collection(kind, (constant(lower[0]), constant(upper[0])))


def _real(formula: Formula) -> Fraction | float | None:
    """The value of a formula that is a real number, or infinite."""
    values = set(formula.values) if isinstance(formula, Expression) and not formula.is_word else set()
    value = values.pop() if len(values) == 1 else None
    return value if isinstance(value, Fraction | float) else None


@lru_cache(maxsize=256)
def variable(name: str) -> Expression:
    """A variable: positive numbers below and above 1, numbers of either sign, and natural numbers."""
    numbers = random.Random(name.encode(errors="surrogatepass"))
    positive = [Fraction(numbers.randrange(100, limit), 1009) for limit in (1000, 1000, 4000, 4000, 4000)]
    signs = (-1, -1, -1, numbers.choice((-1, 1)), numbers.choice((-1, 1)))
    signed = [sign * Fraction(numbers.randrange(100, 4000), 1009) for sign in signs]
    natural = [Fraction(numbers.randrange(31)) for _ in range(NUM_INTEGERS)]
    return Expression((*positive, *signed, *natural) * 2, name)


def _numbers(formula: Formula) -> tuple[Number | None, ...]:
    if not isinstance(formula, Expression) or formula.is_word:
        raise NotAFormula("arithmetic with a list or a word")
    return formula.values


def apply(function: Callable[..., Number], *arguments: Formula, is_complex: bool = False) -> Expression:
    """Compute a function at each point.

    Args:
        function: raises `ArithmeticError` or `ValueError` where it is undefined.
        arguments: expressions.
        is_complex: whether the result may be complex; otherwise it is undefined there.

    Raises:
        NotAFormula: an argument is not an expression.
    """
    columns = list(zip(*map(_numbers, arguments), strict=True))
    values = {column: _at_point(function, column, is_complex) for column in dict.fromkeys(columns)}
    return Expression(tuple(values[column] for column in columns))


def _at_point(function: Callable[..., Number], column: tuple[Number | None, ...], is_complex: bool) -> Number | None:
    if None in column:
        return None
    try:
        value = function(*column)
        if isinstance(value, Fraction):
            is_exact = max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS
            return value if is_exact else float(value)
    except (ArithmeticError, ValueError):
        return None
    value = complex(value)
    if cmath.isnan(value) or (cmath.isinf(value) and not any(map(is_infinite, column))):
        return None
    if value.imag == 0 or abs(value.imag) < 1e-13 * abs(value):
        return value.real
    return value if is_complex else None


def is_infinite(number: Number | None) -> bool:
    """Whether the number is positive or negative infinity."""
    return isinstance(number, float) and math.isinf(number)


def power(base: Number, exponent: Number) -> Number:
    """The exact power if it is small enough; the real root of a negative number for an odd degree."""
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator == 1 and abs(exponent) * size <= MAX_BITS:
            return base**exponent.numerator
        if base < 0 and exponent.denominator % 2:  # the real root
            return (-1) ** (exponent.numerator % 2) * float(-base) ** float(exponent)
    return complex(base) ** complex(exponent) if isinstance(base, complex) else float(base) ** _as_float(exponent)


def _as_float(number: Number) -> float | complex:
    return number if isinstance(number, complex) else float(number)


def add(left: Number, right: Number) -> Number:
    """The sum; 0 if only the rounding errors of cancelling terms are left."""
    total = left + right
    if isinstance(total, Fraction):
        return total
    return 0.0 if abs(total) < ROUNDING * max(abs(complex(left)), abs(complex(right))) else total


def subtract(left: Number, right: Number) -> Number:
    """The difference, see `add`."""
    return add(left, -right)


def factorial(number: Number) -> Fraction:
    """The factorial of a natural number up to `MAX_FACTORIAL`."""
    return Fraction(math.factorial(_as_count(number)))


def binomial(above: Number, below: Number) -> Fraction:
    """The binomial coefficient; undefined if the lower number is larger, because it would be 0 at most points."""
    if _as_count(below) > _as_count(above):
        raise ValueError("the lower number is larger")
    return Fraction(math.comb(_as_count(above), _as_count(below)))


def _as_count(number: Number) -> int:
    if not isinstance(number, Fraction) or number.denominator != 1 or not 0 <= number <= MAX_FACTORIAL:
        raise ValueError("not a small natural number")
    return number.numerator


def rounded(rounded: Callable[[Any], int], number: Number) -> Fraction:
    """The result of `math.floor` or `math.ceil`."""
    if isinstance(number, complex):
        raise ValueError("cannot round a complex number")
    return Fraction(rounded(number))


def root(number: Number, degree: Number) -> Number:
    """The root of a degree."""
    return power(number, 1 / degree)


def call(function: Callable[[complex], complex], number: Number) -> complex:
    """The value of a function of `FUNCTIONS`; 0 if only a rounding error is left, as for sin(pi)."""
    value = function(complex(number))
    return 0.0 if abs(value) < ROUNDING * abs(complex(number)) else value


def log(number: Number, base: Number) -> Number:
    """The logarithm to a base."""
    return cmath.log(complex(number)) / cmath.log(complex(base))


FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "cot": lambda x: 1 / cmath.tan(x),
    "sec": lambda x: 1 / cmath.cos(x),
    "csc": lambda x: 1 / cmath.sin(x),
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "sinh": cmath.sinh,
    "cosh": cmath.cosh,
    "tanh": cmath.tanh,
    "ln": cmath.log,
    "exp": cmath.exp,
    "cis": lambda x: cmath.exp(1j * x),
}
