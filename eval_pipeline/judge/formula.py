"""Compares formulas in LaTeX or plain notation by value, as MATH and AIME need it.

Two expressions are equal if they have the same value at fixed points, one random number per variable and point
(Schwartz-Zippel lemma). Points at which one is undefined do not count, but at least `MIN_DEFINED` must. Sums, products
and integer powers are computed exactly, roots and functions in floating point. Besides expressions, a formula may be an
equation, an inequality, a list, tuple, set, interval, union, ratio or matrix.

Formulas may be hostile: their length and depth, the size of numbers and therefore the time are limited. Only the
standard library is imported, because small server processes use this module.
"""

from __future__ import annotations

import cmath
import math
import operator
import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from itertools import product
from typing import Any, TypeAlias

MAX_FORMULA_CHARS = 400
MAX_DEPTH = 25
MAX_BITS = 1 << 15
"""Bits of an exact numerator or denominator; larger numbers become floats, and no value beyond the range of floats."""
MAX_FACTORIAL = 2500
NUM_INTEGERS = 12
NUM_POINTS = 10 + NUM_INTEGERS
MIN_DEFINED = 3
ROUNDING = 1e-13
"""Relative error below which a floating-point result is 0."""


def equal_formulas(one: str, other: str) -> bool:
    """Whether two formulas have the same value; False if one cannot be parsed.

    `a/bc` may mean `(a/b)c` and `a/(bc)`, and is equal to both; `1,234` may be a number and a list. Units behind a
    number are ignored if the other formula has none, and percent and degree signs always. A formula equals
    `x = formula`, `1 \\pm 2` equals the list of both values, and `x < 3` equals `(-\\infty, 3)`.
    """
    texts = [_normalize(text) for text in (one, other)]
    if any(len(text) > MAX_FORMULA_CHARS or _PROSE.search(text) for text in texts):
        return False
    is_complex = any(_IMAGINARY.search(text) for text in texts)
    lefts, rights = (_readings(text, is_complex) for text in texts)
    return any(_equal_readings(left, right) for left, right in product(lefts, rights))


class _NotAFormula(Exception):
    """The text has a syntax or a meaning that this module does not know."""


# Values

_Number: TypeAlias = Fraction | float | complex


@dataclass(frozen=True)
class _Expression:
    """A number for each point, or None where it is undefined: with the upper signs of `\\pm`, then with the lower."""

    values: tuple[_Number | None, ...]
    name: str = ""
    """Set if the expression is nothing but a variable or an applied function, `f(x)`."""
    is_word: bool = False
    """Whether it is a word, which has a value only to be compared."""


@dataclass(frozen=True)
class _Collection:
    kind: str
    """`list`, `set`, `union`, `:`, `matrix`, `row`, `base`, or the brackets of a tuple or interval, such as `[)`."""
    items: tuple[_Formula, ...]


@dataclass(frozen=True)
class _Relation:
    """`sides[0] operators[0] sides[1] operators[1] …`."""

    operators: tuple[str, ...]
    sides: tuple[_Formula, ...]


_Formula: TypeAlias = "_Expression | _Collection | _Relation"


@dataclass(frozen=True)
class _Reading:
    """One meaning of a text."""

    formula: _Formula
    units: frozenset[str]


def _constant(value: _Number) -> _Expression:
    return _Expression((value,) * (2 * NUM_POINTS))


@lru_cache(maxsize=256)
def _variable(name: str) -> _Expression:
    """Positive numbers below and above 1, numbers of either sign, and natural numbers."""
    numbers = random.Random(name.encode(errors="surrogatepass"))
    positive = [Fraction(numbers.randrange(100, limit), 1009) for limit in (1000, 1000, 4000, 4000, 4000)]
    signs = (-1, -1, -1, numbers.choice((-1, 1)), numbers.choice((-1, 1)))
    signed = [sign * Fraction(numbers.randrange(100, 4000), 1009) for sign in signs]
    natural = [Fraction(numbers.randrange(31)) for _ in range(NUM_INTEGERS)]
    return _Expression((*positive, *signed, *natural) * 2, name)


def _numbers(formula: _Formula) -> tuple[_Number | None, ...]:
    if not isinstance(formula, _Expression) or formula.is_word:
        raise _NotAFormula("arithmetic with a list or a word")
    return formula.values


def _apply(function: Callable[..., _Number], *arguments: _Formula, is_complex: bool = False) -> _Expression:
    """The function at each point; None where an argument is undefined, or the result undefined, too big or not real."""
    columns = list(zip(*map(_numbers, arguments), strict=True))
    values = {column: _at_point(function, column, is_complex) for column in dict.fromkeys(columns)}
    return _Expression(tuple(values[column] for column in columns))


def _at_point(function: Callable[..., _Number], column: tuple[_Number | None, ...], is_complex: bool) -> _Number | None:
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
    if cmath.isnan(value) or (cmath.isinf(value) and not any(map(_is_infinite, column))):
        return None
    if value.imag == 0 or abs(value.imag) < 1e-13 * abs(value):
        return value.real
    return value if is_complex else None


def _is_infinite(number: _Number | None) -> bool:
    return isinstance(number, float) and math.isinf(number)


def _power(base: _Number, exponent: _Number) -> _Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator == 1 and abs(exponent) * size <= MAX_BITS:
            return base**exponent.numerator
        if base < 0 and exponent.denominator % 2:  # the real root
            return (-1) ** (exponent.numerator % 2) * float(-base) ** float(exponent)
    return complex(base) ** complex(exponent) if isinstance(base, complex) else float(base) ** _as_float(exponent)


def _as_float(number: _Number) -> float | complex:
    return number if isinstance(number, complex) else float(number)


def _sum(left: _Number, right: _Number) -> _Number:
    total = left + right
    if isinstance(total, Fraction):
        return total
    # what is left of terms that cancel is their rounding error
    return 0.0 if abs(total) < ROUNDING * max(abs(complex(left)), abs(complex(right))) else total


def _difference(left: _Number, right: _Number) -> _Number:
    return _sum(left, -right)


def _factorial(number: _Number) -> Fraction:
    return Fraction(math.factorial(_as_count(number)))


def _binomial(above: _Number, below: _Number) -> Fraction:
    if _as_count(below) > _as_count(above):
        raise ValueError("it would be 0 for most points")
    return Fraction(math.comb(_as_count(above), _as_count(below)))


def _as_count(number: _Number) -> int:
    if not isinstance(number, Fraction) or number.denominator != 1 or not 0 <= number <= MAX_FACTORIAL:
        raise ValueError("not a small natural number")
    return number.numerator


def _round(rounded: Callable[[Any], int], number: _Number) -> Fraction:
    if isinstance(number, complex):
        raise ValueError("cannot round a complex number")
    return Fraction(rounded(number))


def _root(number: _Number, degree: _Number) -> _Number:
    return _power(number, 1 / degree)


def _with(function: Callable[[complex], complex], number: _Number) -> complex:
    value = function(complex(number))
    return 0.0 if abs(value) < ROUNDING * abs(complex(number)) else value  # sin(pi)


def _log(number: _Number, base: _Number) -> _Number:
    return cmath.log(complex(number)) / cmath.log(complex(base))


_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
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
}
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell hbar".split()
)
_UNITS = {
    word: words.split()[0]
    for words in (
        "mm millimeter millimeters", "cm centimeter centimeters", "m meter meters", "km kilometer kilometers",
        "in inch inches", "ft foot feet", "yd yard yards", "mi mile miles", "unit units", "square sq", "cubic",
        "s sec second seconds", "min minute minutes", "h hr hour hours", "day days", "week weeks", "month months",
        "yr year years", "mg milligram milligrams", "g gram grams", "kg kilogram kilograms", "lb lbs pound pounds",
        "oz ounce ounces", "ton tons", "deg degree degrees", "rad radian radians", "dollar dollars", "cent cents",
        "ml milliliter milliliters", "l liter liters litre litres", "gal gallon gallons", "mph", "per", "percent",
    )
    for word in words.split()
}  # fmt: skip

# Syntax

_SIGNS = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u00d7": "*", "\u00b7": "*", "\u22c5": "*", "\u00f7": "/", "\u2044": "/",
        "\u2264": "\\le ", "\u2265": "\\ge ", "\u2260": "\\ne ", "\u2248": "=", "\u00b1": "\\pm ", "\u2213": "\\mp ",
        "\u221e": "\\infty ", "\u222a": "\\cup ", "\u2208": "\\in ", "\u2205": "\\emptyset ", "\u03c0": "\\pi ",
        "\u221a": "\\sqrt ", "\u211d": "\\R ", "\u00b0": "\\degree ", "\u00b2": "^2", "\u00b3": "^3", "\u2074": "^4",
        "\u2075": "^5", "\u2076": "^6", "\u2077": "^7", "\u2078": "^8", "\u2079": "^9", '"': " ", "~": " ", "$": " ",
    }
)  # fmt: skip
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s?\{([^{}]*)\}")
_SYNONYMS: list[tuple[re.Pattern[str], str]] = [
    (
        re.compile(
            r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|q?quad|mathit|boldsymbol)(?![A-Za-z])"
        ),
        " ",
    ),
    (re.compile(r"(?<!\\)(?:\\[,:]|\{,\})(?:\\!)?(?=[0-9]{3}(?![0-9]))|,\\!(?=[0-9]{3})"), ""),
    (re.compile(r"(?<!\\)\\[,;:! ]"), " "),
    (re.compile(r"\\mathbb\s?\{?R\}?"), r"\\R "),
    (re.compile(r"\\(mathbb|vec|hat|dot|bar|overline)\s?(?:\{([A-Za-z]{1,3})\}|([A-Za-z]))"), r" \2\3_{\1}"),
    (re.compile(r"\\(?:dfrac|tfrac|cfrac)"), r"\\frac"),
    (re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"^([^{}]*)\\over(?![A-Za-z])([^{}]*)$"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\[dt]binom"), r"\\binom"),
    (re.compile(r"\\(?:leqslant|leq)(?![A-Za-z])|<="), r"\\le "),
    (re.compile(r"\\(?:geqslant|geq)(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])|!="), r"\\ne "),
    (re.compile(r"\\approx(?![A-Za-z])"), "="),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])"), "*"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\[lr]?vert(?![A-Za-z])"), "|"),
    (re.compile(r"\\l?brace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\^\s?(?:\\circ|\{\s?\\circ\s?\})"), r"\\degree "),
    (re.compile(r"\\?%"), " "),
    (re.compile(r"(?<=[0-9]) x (?=[0-9])"), "*"),
    (re.compile(r"\\begin\{[bp]matrix\}"), r"\\matrix "),
    (re.compile(r"\\end\{[bp]matrix\}"), r"\\end "),
    (re.compile(r"(?<=[\])}]) ?U ?(?=[\[({\\])"), r"\\cup "),
    (re.compile(r"(?<![A-Za-z\\])(?:square|sq\.?|cubic) (?=[a-z])"), ""),
]
_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?")
_THOUSANDS = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]*)?")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot) ?\{?([0-9]+)\}?")
_MIXED = re.compile(
    r"([0-9]+) ?(?:\\frac ?(?:\{ ?([0-9]+) ?\}|([0-9])) ?(?:\{ ?([0-9]+) ?\}|([0-9]))| ([0-9]+) ?/ ?([0-9]+))"
)
_DIGIT = re.compile(r"[0-9]")
_FUNCTIONS_PATTERN = "|".join([*sorted(_FUNCTIONS, key=len, reverse=True), "log", "lg"])
_FUNCTION = re.compile(rf"\\?({_FUNCTIONS_PATTERN})(?![A-Za-z])")
_PLAIN_NAMES = "|".join(["sqrt", "pi", "infinity", "infty", "or", "and", *(name for name in _GREEK if len(name) > 3)])
_PLAIN_COMMAND = re.compile(rf"(?<![A-Za-z\\])({_PLAIN_NAMES})(?![A-Za-z])")
_PLAIN_COMMANDS = {"infinity": "infty"}
_PROSE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,} [A-Za-z]{2,}")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_QUOTED = re.compile(r'"([^"]*)"')
_WORD = re.compile(r"[A-Za-z]{4,}")
_BEFORE_WORD = re.compile(r"(?:^|[=,;:(\[{<>]|\\(?:or|and|in|le|ge|ne))\s*$")
_AFTER_WORD = re.compile(r"\s*(?:$|[=,;:)\]}<>]|\\(?:or|and|in|le|ge|ne)(?![A-Za-z]))")
_APPLIED = re.compile(r"\s*[fghpqFGHPQ]'*(?:_\S+)? ?\([A-Za-z0-9., ]*\)")
_LETTER = re.compile(r"([A-Za-z])")
_SUFFIX = re.compile(r" ?(?:_ ?(?:\{([^{}]*)\}|([A-Za-z0-9]))|('+))")
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
_RELATION = re.compile(r"([=<>])|\\(le|ge|ne|in)(?![A-Za-z])")
_SEPARATOR = re.compile(r"[,;]|\\(?:or|and)(?![A-Za-z])")
_CUP = re.compile(r"\\cup(?![A-Za-z])")
_PLUS_MINUS = re.compile(r"([-+])|\\(pm|mp)(?![A-Za-z])")
_CLOSING = re.compile(r"\\?[\])}]|\\rangle(?![A-Za-z])")
_FACTOR = re.compile(
    r'[0-9A-Za-z({".]|\\\{|\\(?!(?:le|ge|ne|in|or|and|cup|pm|mp|end|rangle|rfloor|rceil|degree)(?![A-Za-z]))[A-Za-z]'
)
_NO_FACTOR = re.compile(r"(?:[0-9]|(?<![A-Za-z\\])[A-Za-z]+)\s*$")
_END = re.compile(r"\\end")
_BRACKET = re.compile(r"[({]")
_UNIT = re.compile(r' ?(/?) ?(?:"([^"]*)"|(?<![A-Za-z0-9])([A-Za-z]+)(?![A-Za-z(_]))(?: ?\^ ?(?:[23]|\{ ?[23] ?\}))?')
_OPENING = {"(": "(", "[": "[", "{": "", "\\{": "{", "\\langle": "("}
_CLOSED = {")": ")", "]": "]", "}": "", "\\}": "}", "\\rangle": ")"}


def _normalize(text: str) -> str:
    """The text with one notation for each sign, and words in quotes."""
    text = text.translate(_SIGNS)
    for pattern, replacement in _SYNONYMS:
        text = pattern.sub(replacement, text)
    text = _WORDS.sub(_quote, text)
    text = _PLAIN_COMMAND.sub(lambda word: rf"\{_PLAIN_COMMANDS.get(word[1], word[1])} ", text)
    return " ".join(text.split()).rstrip(".")


def _quote(words: re.Match[str]) -> str:
    text = words[1].strip()
    if len(text) < 2 or _FUNCTION.fullmatch(text) or text in ("or", "and") or _NUMBER.fullmatch(text):
        return f" {text} "
    return f' "{text.casefold()}" '


def _readings(text: str, is_complex: bool) -> list[_Reading]:
    """The meanings of a normalized text; none if it is not a formula."""
    found = []
    for tight, joins in product((False, True) if "/" in text else (False,), (True, False) if "," in text else (True,)):
        parser = _Parser(text, is_complex, tight, joins)
        with suppress(_NotAFormula):
            found.append(_Reading(parser.parse(), frozenset(parser.units)))
    return found


class _Parser:
    """Computes a formula while reading it.

    Args:
        text: a normalized formula.
        is_complex: whether roots and logarithms may be complex.
        tight: whether `a/bc` means `a/(bc)`.
        joins: whether `1,234` is a number and not a list.

    Attributes:
        units: the ignored units.
    """

    def __init__(self, text: str, is_complex: bool, tight: bool, joins: bool) -> None:
        self.units: set[str] = set()
        self._text = text
        self._position = 0
        self._unit_end = -1
        self._tight = tight
        self._joins = joins
        self._is_complex = is_complex
        self._apply = partial(_apply, is_complex=is_complex)
        self._depth = 0
        self._bars = 0
        self._arguments = 0

    def parse(self) -> _Formula:
        formula = self._items()
        if self._rest():
            raise _NotAFormula(self._rest())
        return formula

    def _rest(self) -> str:
        return self._text[self._position :].strip()

    def _skip_spaces(self) -> None:
        while self._text.startswith(" ", self._position):
            self._position += 1

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self._skip_spaces()
        found = pattern.match(self._text, self._position)
        if found:
            self._position = found.end()
        return found

    def _take_text(self, text: str) -> bool:
        self._skip_spaces()
        found = self._text.startswith(text, self._position)
        if found:
            self._position += len(text)
        return found

    def _require(self, text: str) -> None:
        if not self._take_text(text):
            raise _NotAFormula(f"no {text} before {self._rest()}")

    def _is_before(self, pattern: re.Pattern[str]) -> bool:
        self._skip_spaces()
        return pattern.match(self._text, self._position) is not None

    # from the loosest to the tightest binding

    def _items(self) -> _Formula:
        if self._is_before(_CLOSING):
            items: list[_Formula] = []
        else:
            items = [self._relation()]
            if self._take_text(":"):
                items = [_Collection(":", (items[0], self._relation()))]
            while self._take(_SEPARATOR):
                self._take(_SEPARATOR)  # `1, 2, and 3`
                items.append(self._relation())
        return items[0] if len(items) == 1 else _Collection("list", tuple(items))

    def _relation(self) -> _Formula:
        sides, operators = [self._union()], []
        while found := self._take(_RELATION):
            operators.append(found[1] or found[2])
            sides.append(self._union())
        if not operators:
            return sides[0]
        if operators == ["in"]:
            return sides[1]
        return _Relation(tuple(operators), tuple(sides))

    def _union(self) -> _Formula:
        parts = [self._sum()]
        while self._take(_CUP):
            parts.append(self._sum())
        if len(parts) == 1:
            return parts[0]
        sets = [part for part in parts if isinstance(part, _Collection) and part.kind == "set"]
        if len(sets) == len(parts):
            return _Collection("set", tuple(item for part in sets for item in part.items))
        return _Collection("union", tuple(parts))

    def _sum(self) -> _Formula:
        total = self._signed(self._term)
        while found := self._take(_PLUS_MINUS):
            total = self._add(total, found[0], self._term())
        return total

    def _signed(self, operand: Callable[[], _Formula]) -> _Formula:
        found = self._take(_PLUS_MINUS)
        if found is None or found[0] == "+":
            return operand()
        return self._add(_constant(Fraction(0)), found[0], operand())

    def _add(self, left: _Formula, sign: str, right: _Formula) -> _Formula:
        if sign == "+":
            return self._apply(_sum, left, right)
        if sign == "-":
            return self._apply(_difference, left, right)
        plus, minus = self._apply(_sum, left, right), self._apply(_difference, left, right)
        upper, lower = (plus, minus) if sign == "\\pm" else (minus, plus)
        return _Expression(upper.values[:NUM_POINTS] + lower.values[NUM_POINTS:])

    def _term(self) -> _Formula:
        start = self._position
        value = self._signed(self._factor)
        while True:
            if self._take_text("*"):
                value = self._multiply(value, self._signed(self._factor))
            elif self._take_text("/"):
                divisor = self._signed(self._factor)
                while self._tight and self._is_before(_FACTOR) and not self._take_unit(start):
                    divisor = self._apply(operator.mul, divisor, self._factor())
                value = self._apply(operator.truediv, value, divisor)
            elif self._take_unit(start):
                continue
            elif self._is_before(_FACTOR) or (self._bars == 0 and self._text.startswith("|", self._position)):
                value = self._times(value, start)
            else:
                return value

    def _take_unit(self, start: int) -> bool:
        """Skip a unit behind a number, with its power: `5 "cm" ^2`, `5 km/h`."""
        position, follows_unit = self._position, self._unit_end == self._position
        if not _DIGIT.search(self._text, start, position):
            return False
        found = self._take(_UNIT)
        words = (found[2] if found[2] is not None else found[3]).casefold() if found else ""
        units = [_UNITS.get(word) for word in re.split(r"[^a-z]+", words) if word]
        is_variable = found is not None and found[2] is None and len(words) < 2 and not follows_unit
        if found is None or is_variable or (found[1] and not follows_unit) or not units or None in units:
            self._position = position
            return False
        self.units.update(unit for unit in units if unit is not None)
        self._unit_end = self._position
        return True

    def _times(self, value: _Formula, start: int) -> _Formula:
        self._skip_spaces()
        after = self._text[self._position]
        is_variable = isinstance(value, _Expression) and bool(value.name)
        if after.isdigit() and (_NO_FACTOR.search(self._text[: self._position]) or self._unit_end >= start):
            raise _NotAFormula("a number after a number, a variable or a unit")
        factor = self._factor()
        if is_variable and (after == "(" or isinstance(factor, _Collection)):
            name = self._text[start : self._position]
            if isinstance(factor, _Collection):
                return _variable(name)
            values = self._apply(operator.mul, value, factor).values
            return _Expression(values, name if _APPLIED.fullmatch(name) else "")
        return self._multiply(value, factor)

    def _multiply(self, left: _Formula, right: _Formula) -> _Formula:
        """The product; a matrix is multiplied by entry."""
        for matrix, factor in ((left, right), (right, left)):
            if isinstance(matrix, _Collection) and matrix.kind in ("matrix", "row"):
                return _Collection(matrix.kind, tuple(self._multiply(item, factor) for item in matrix.items))
        return self._apply(operator.mul, left, right)

    def _factor(self) -> _Formula:
        base = self._atom()
        while True:
            if self._take_text("!"):
                base = self._apply(_factorial, base)
            elif self._take_text("\\degree"):
                if self._arguments:
                    base = self._apply(operator.mul, base, _constant(math.pi / 180))
            elif self._take_text("^"):
                base = self._apply(_power, base, self._exponent())
            else:
                return base

    def _exponent(self) -> _Formula:
        return self._signed(partial(self._atom, may_be_mixed=False))

    def _atom(self, may_be_mixed: bool = True) -> _Formula:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _NotAFormula("nested too deeply")
        atom = self._read_atom(may_be_mixed)
        self._depth -= 1
        return atom

    def _read_atom(self, may_be_mixed: bool) -> _Formula:
        if found := self._take(_REPEATING):
            return _constant(_repeating(*found.groups()))
        if may_be_mixed and (found := self._take(_MIXED)):
            whole, above, below = (int(part) for part in found.groups() if part)
            if below == 0:
                raise _NotAFormula("division by zero")
            return _constant(whole + Fraction(above, below))
        if found := (self._joins and self._take(_THOUSANDS)) or self._take(_NUMBER):
            return self._number(found[0])
        for opening, bracket in _OPENING.items():
            if self._take_text(opening):
                return self._group(bracket)
        if self._take_text("|"):
            self._bars += 1
            inside = self._sum()
            self._require("|")
            self._bars -= 1
            return self._apply(abs, inside)
        if found := self._take(_FUNCTION):
            return self._function(found[1])
        if found := self._take(_COMMAND):
            return self._command(found[1])
        if found := self._take(_QUOTED):
            return replace(_variable(found[1]), is_word=True)
        if found := self._take_lone_word():
            return replace(_variable(found[0].casefold()), is_word=True)
        if found := self._take(_LETTER):
            return self._letter(found[1])
        raise _NotAFormula(self._rest())

    def _number(self, digits: str) -> _Formula:
        value = Fraction(digits.replace(",", ""))
        if found := self._take(_SUFFIX):
            base = found[1] or found[2]
            if not base or not base.isdigit():
                raise _NotAFormula("subscript of a number")
            return _Collection("base", (_constant(value), _constant(Fraction(base))))
        return _constant(value)

    def _take_lone_word(self) -> re.Match[str] | None:
        """Take a word that is all of a side or an item; other words are products of variables."""
        self._skip_spaces()
        found = _WORD.match(self._text, self._position)
        if found is None or not _BEFORE_WORD.search(self._text[: found.start()]):
            return None
        return self._take(_WORD) if _AFTER_WORD.match(self._text, found.end()) else None

    def _letter(self, letter: str) -> _Formula:
        name = letter
        while found := self._take(_SUFFIX):
            name += found[0].strip().replace("{", "").replace("}", "").replace(" ", "")
        if name == "e":
            return _constant(math.e)
        if name == "i" and self._is_complex:
            return _constant(1j)
        return _variable(name)

    def _group(self, opening: str) -> _Formula:
        bars, self._bars = self._bars, 0
        inside = self._items()
        self._bars = bars
        found = self._take(_CLOSING)
        if found is None:
            raise _NotAFormula("an open bracket")
        closing = _CLOSED[found[0]]
        is_list = isinstance(inside, _Collection) and inside.kind == "list"
        items = inside.items if isinstance(inside, _Collection) and is_list else (inside,)
        if opening == "{" or closing == "}":
            if (opening, closing) != ("{", "}"):
                raise _NotAFormula("unequal braces")
            return _Collection("set", items)
        if is_list and opening:
            return _Collection(opening + closing, items)
        if opening + closing not in ("", "()", "[]"):
            raise _NotAFormula("unequal brackets")
        return inside

    def _argument(self) -> _Formula:
        """An argument of a LaTeX command: a group, a digit, or a factor."""
        if self._take_text("{"):
            return self._group("")
        if found := self._take(_DIGIT):
            return _constant(Fraction(found[0]))
        return self._atom()

    def _command(self, name: str) -> _Formula:
        if name == "frac":
            return self._apply(operator.truediv, self._argument(), self._argument())
        if name == "binom":
            return self._apply(_binomial, self._argument(), self._argument())
        if name == "sqrt":
            degree: _Formula = _constant(Fraction(2))
            if self._take_text("["):
                degree = self._sum()
                self._require("]")
            radicand = self._number(found[0]) if (found := self._take(_NUMBER)) else self._argument()
            return self._apply(_root, radicand, degree)
        if name == "pi":
            return _constant(math.pi)
        if name == "infty":
            return _constant(math.inf)
        if name == "emptyset":
            return _Collection("set", ())
        if name == "R":
            return _Collection("()", (_constant(-math.inf), _constant(math.inf)))
        if name in ("lfloor", "lceil"):
            inside = self._sum()
            self._require("\\rfloor" if name == "lfloor" else "\\rceil")
            return self._apply(partial(_round, math.floor if name == "lfloor" else math.ceil), inside)
        if name == "matrix":
            return self._matrix()
        if name in _GREEK:
            return self._letter(name)
        raise _NotAFormula(name)

    def _matrix(self) -> _Formula:
        rows = [[self._sum()]]
        while not self._take_text("\\end"):
            if self._take_text("&"):
                rows[-1].append(self._sum())
            else:
                self._require("\\\\")
                if not self._is_before(_END):
                    rows.append([self._sum()])
        return _Collection("matrix", tuple(_Collection("row", tuple(row)) for row in rows))

    def _function(self, name: str) -> _Formula:
        base: _Formula = _constant(Fraction(10))
        power: _Formula | None = None
        if name == "log" and self._take_text("_"):
            base = self._argument()
        if self._take_text("^"):
            power = self._exponent()
            if name in _INVERSES and isinstance(power, _Expression) and power.values[0] == -1:
                name, power = _INVERSES[name], None
        self._arguments += 1
        argument = self._function_argument()
        self._arguments -= 1
        if name in ("log", "lg"):
            value = self._apply(_log, argument, base)
        else:
            value = self._apply(partial(_with, _FUNCTIONS[name]), argument)
        return value if power is None else self._apply(_power, value, power)

    def _function_argument(self) -> _Formula:
        """`(x+1)`, or a product up to the next sign or function: `\\sin 2x`."""
        is_group = self._is_before(_BRACKET)
        value = self._factor()
        while not is_group and self._is_before(_FACTOR) and not self._is_before(_FUNCTION):
            value = self._apply(operator.mul, value, self._factor())
        return value


def _repeating(whole: str, fixed: str, repeated: str) -> Fraction:
    start = Fraction(int(whole + fixed or "0"), 10 ** len(fixed))
    return start + Fraction(int(repeated), 10 ** len(fixed) * (10 ** len(repeated) - 1))


# Comparison

_UNORDERED = frozenset({"list", "set", "union"})


def _equal_readings(left: _Reading, right: _Reading) -> bool:
    has_same_units = not left.units or not right.units or left.units == right.units
    return has_same_units and _equal(left.formula, right.formula)


def _equal(left: _Formula, right: _Formula) -> bool:
    if isinstance(left, _Relation) and isinstance(right, _Relation):
        return _equal_relations(left, right)
    if isinstance(left, _Relation):
        result = _result(left)
        return result is not None and _equal(result, right)
    if isinstance(right, _Relation):
        # the right side of `x^2 + y^2 = 4` is not the result
        states_result = not isinstance(right.sides[0], _Expression) or bool(right.sides[0].name)
        result = _result(right)
        return states_result and result is not None and _equal(left, result)
    if isinstance(left, _Expression) and isinstance(right, _Expression):
        return _equal_values(left, right)
    left, right = _without_signs(left), _without_signs(right)
    if not (isinstance(left, _Collection) and isinstance(right, _Collection)):
        return False
    kinds = {left.kind, right.kind}
    if kinds <= _UNORDERED:
        found = [[_equal(item, other) for other in right.items] for item in left.items]
        return all(map(any, found)) and (all(map(any, zip(*found, strict=True))) if found else not right.items)
    if len(left.items) != len(right.items) or not (len(kinds) == 1 or kinds == {"list", "()"}):
        return False
    return all(_has_sorted_names(each.items) for each in (left, right)) and all(map(_equal, left.items, right.items))


def _has_sorted_names(items: tuple[_Formula, ...]) -> bool:
    """False if equations, such as `y = 1, x = 2`, are in another order than the entries of a tuple."""
    firsts = [item.sides[0] for item in items if isinstance(item, _Relation)]
    names = [first.name for first in firsts if isinstance(first, _Expression)]
    return names == sorted(names)


def _without_signs(formula: _Formula) -> _Formula:
    """The list of both values of an expression with `\\pm`."""
    if not isinstance(formula, _Expression):
        return formula
    upper, lower = formula.values[:NUM_POINTS], formula.values[NUM_POINTS:]
    return formula if upper == lower else _Collection("list", (_Expression(upper * 2), _Expression(lower * 2)))


def _equal_values(left: _Expression, right: _Expression) -> bool:
    halves = [(side.values[:NUM_POINTS], side.values[NUM_POINTS:]) for side in (left, right)]
    (upper, lower), (other_upper, other_lower) = halves
    return (_agree(upper, other_upper) and _agree(lower, other_lower)) or (
        _agree(upper, other_lower) and _agree(lower, other_upper)
    )


def _agree(left: tuple[_Number | None, ...], right: tuple[_Number | None, ...]) -> bool:
    pairs = [(one, other) for one, other in zip(left, right, strict=True) if one is not None and other is not None]
    return len(pairs) >= MIN_DEFINED and all(_is_close(one, other) for one, other in pairs)


def _is_close(one: _Number, other: _Number) -> bool:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    try:
        return cmath.isclose(complex(one), complex(other), rel_tol=1e-11)
    except OverflowError:  # an exact number beyond the range of floats
        return False


def _result(relation: _Relation) -> _Formula | None:
    """The last side of equations, or the interval of `x < 3` or `1 \\le x < 3`; None for another form."""
    operators, sides = relation.operators, relation.sides
    if set(operators) == {"="}:
        return sides[-1]
    if set(operators) <= {">", "ge"}:
        operators = tuple({">": "<", "ge": "le"}[each] for each in reversed(operators))
        sides = tuple(reversed(sides))
    if not set(operators) <= {"<", "le"}:
        return None
    names = [isinstance(side, _Expression) and bool(side.name) for side in sides]
    opening = {"<": "(", "le": "["}[operators[0]]
    closing = {"<": ")", "le": "]"}[operators[-1]]
    if names == [True, False]:
        return _Collection("(" + closing, (_constant(-math.inf), sides[1]))
    if names == [False, True]:
        return _Collection(opening + ")", (sides[0], _constant(math.inf)))
    if names == [False, True, False]:
        return _Collection(opening + closing, (sides[0], sides[2]))
    return None


def _equal_relations(left: _Relation, right: _Relation) -> bool:
    """Whether two equations or inequalities differ by a factor only; chains must have equal sides."""
    if len(left.operators) == len(right.operators) == 1:
        return _proportional(left, right)
    return any(
        left.operators == relation.operators and all(map(_equal, left.sides, relation.sides))
        for relation in (right, _reversed(right))
    )


def _reversed(relation: _Relation) -> _Relation:
    swapped = {"<": ">", ">": "<", "le": "ge", "ge": "le"}
    operators = tuple(swapped.get(each, each) for each in reversed(relation.operators))
    return _Relation(operators, tuple(reversed(relation.sides)))


def _proportional(left: _Relation, right: _Relation) -> bool:
    if left.operators[0] in (">", "ge"):
        left = _reversed(left)
    if right.operators[0] in (">", "ge"):
        right = _reversed(right)
    if left.operators != right.operators:
        return False
    if not all(isinstance(side, _Expression) for side in (*left.sides, *right.sides)):
        return all(map(_equal, left.sides, right.sides))
    differences = [_apply(_difference, *relation.sides) for relation in (left, right)]
    if any(map(_is_infinite, (value for difference in differences for value in difference.values))):
        return all(map(_equal, left.sides, right.sides))
    ratios = [ratio for ratio in _apply(operator.truediv, *differences).values if ratio is not None]
    is_directed = left.operators[0] in ("<", "le")
    return (
        len(ratios) >= MIN_DEFINED
        and all(_is_close(ratio, ratios[0]) for ratio in ratios)
        and ratios[0] != 0
        and (not is_directed or (not isinstance(ratios[0], complex) and ratios[0] > 0))
    )
