"""Compares formulas in LaTeX or plain notation by value, as MATH and AIME need it.

Two expressions are equal if they have the same value at fixed points, one random number per variable and point
(Schwartz-Zippel lemma). Sums, products and integer powers are computed exactly, roots and functions in floating point.
Besides expressions, a formula may be an equation, an inequality, a list, tuple, set, interval, union, ratio or matrix.

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
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from itertools import product
from typing import Any, TypeAlias

MAX_FORMULA_CHARS = 400
MAX_DEPTH = 25
MAX_BITS = 8192
"""Bits of an exact numerator or denominator; larger numbers become floats, and no value beyond the range of floats."""
MAX_FACTORIAL = 1000
NUM_POINTS = 10
MIN_DEFINED = 3
"""Points at which both expressions must be defined: `\\ln x` is not for negative numbers."""


def equal_formulas(one: str, other: str) -> bool:
    """Whether two formulas have the same value; False if one cannot be parsed.

    `a/bc` may mean `(a/b)c` and `a/(bc)`, and is equal to both. Units behind a number, percent and degree signs are
    ignored. A formula equals `x = formula`, `1 \\pm 2` equals the list of both values, and `x < 3` equals
    `(-\\infty, 3)`.
    """
    texts = [_normalize(text) for text in (one, other)]
    if any(len(text) > MAX_FORMULA_CHARS for text in texts):
        return False
    is_complex = any(_IMAGINARY.search(text) for text in texts)
    readings = (
        [_Parser(text, is_complex, tight) for tight in ((False, True) if "/" in text else (False,))] for text in texts
    )
    try:
        parsed = [[parser.parse() for parser in parsers] for parsers in readings]
        return any(_equal(left, right) for left, right in product(*parsed))
    except _NotAFormula:
        return False


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


@dataclass(frozen=True)
class _Collection:
    kind: str
    """`list`, `set`, `union`, `:`, `matrix`, `row`, `base`, or the two brackets of a tuple or interval."""
    items: tuple[_Formula, ...]


@dataclass(frozen=True)
class _Relation:
    """`sides[0] operators[0] sides[1] operators[1] …`."""

    operators: tuple[str, ...]
    sides: tuple[_Formula, ...]


_Formula: TypeAlias = "_Expression | _Collection | _Relation"


def _constant(value: _Number) -> _Expression:
    return _Expression((value,) * (2 * NUM_POINTS))


@lru_cache(maxsize=256)
def _variable(name: str) -> _Expression:
    """Positive and negative numbers, below and above 1, and integers of both parities."""
    numbers = random.Random(name)
    small = [Fraction(numbers.randrange(100, 1000), 1009) for _ in range(3)]
    large = [Fraction(numbers.randrange(1100, 4000), 1009) for _ in range(4)]
    first = numbers.randrange(2, 9)
    signs = [numbers.choice((-1, 1)) for _ in range(2)]
    values = (
        *small[:2],
        -small[2],
        *large[:2],
        signs[0] * large[2],
        signs[1] * large[3],
        *map(Fraction, (first, first + 1, first + 3)),
    )
    return _Expression(values * 2, name)


def _numbers(formula: _Formula) -> tuple[_Number | None, ...]:
    if not isinstance(formula, _Expression):
        raise _NotAFormula("arithmetic with a list")
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


def _factorial(number: _Number) -> Fraction:
    return Fraction(math.factorial(_as_count(number)))


def _binomial(above: _Number, below: _Number) -> Fraction:
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
    return function(complex(number))


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
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell".split()
)

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
    (re.compile(r"\\(?:dfrac|tfrac|cfrac)"), r"\\frac"),
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
    (re.compile(r"\\begin\{([bpv])matrix\}"), r"\\\1matrix "),
    (re.compile(r"\\end\{[bpv]matrix\}"), r"\\end "),
]
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot) ?\{?([0-9]+)\}?")
_MIXED = re.compile(
    r"([0-9]+) ?(?:\\frac ?(?:\{ ?([0-9]+) ?\}|([0-9])) ?(?:\{ ?([0-9]+) ?\}|([0-9]))| ([0-9]+) ?/ ?([0-9]+))"
)
_DIGIT = re.compile(r"[0-9]")
_FUNCTIONS_PATTERN = "|".join([*sorted(_FUNCTIONS, key=len, reverse=True), "log", "lg"])
_FUNCTION = re.compile(rf"\\?({_FUNCTIONS_PATTERN})(?![A-Za-z])")
_PLAIN_NAMES = "|".join(
    ["sqrt", "pi", "infinity", "infty", "or", "and", "U", *(name for name in _GREEK if len(name) > 3)]
)
_PLAIN_COMMAND = re.compile(rf"(?<![A-Za-z\\])({_PLAIN_NAMES})(?![A-Za-z])")
_PLAIN_COMMANDS = {"infinity": "infty", "U": "cup"}
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_NAME = re.compile(r'"([^"]*)"|([A-Za-z]{4,})')
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
_END = re.compile(r"\\end")
_BRACKET = re.compile(r"[({]")
_UNIT_WORD = (
    rf'(?:"[^"]*"|(?!(?:{_FUNCTIONS_PATTERN})(?![A-Za-z]))[A-Za-z]{{4,}}|(?:[cmk]m|ft|yd|in|kg|mph)(?![A-Za-z]))'
)
_UNIT = re.compile(rf" ?/? ?{_UNIT_WORD}(?: ?\^ ?(?:[23]|\{{ ?[23] ?\}}))?")
_OPENING = {"(": "(", "[": "[", "{": "", "\\{": "{", "\\langle": "<"}
_CLOSED = {")": ")", "]": "]", "}": "", "\\}": "}", "\\rangle": ">"}


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


class _Parser:
    """Computes a formula while reading it.

    Args:
        text: a normalized formula.
        is_complex: whether roots and logarithms may be complex.
        tight: whether `a/bc` means `a/(bc)`.
    """

    def __init__(self, text: str, is_complex: bool, tight: bool) -> None:
        self._text = text
        self._position = 0
        self._tight = tight
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
            return self._apply(operator.add, left, right)
        if sign == "-":
            return self._apply(operator.sub, left, right)
        plus, minus = self._apply(operator.add, left, right), self._apply(operator.sub, left, right)
        upper, lower = (plus, minus) if sign == "\\pm" else (minus, plus)
        return _Expression(upper.values[:NUM_POINTS] + lower.values[NUM_POINTS:])

    def _term(self) -> _Formula:
        start = self._position
        value = self._signed(self._factor)
        while True:
            if self._take_text("*"):
                value = self._apply(operator.mul, value, self._signed(self._factor))
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
        """Skip words behind a number, with their powers: `5 "cm" ^2`, `5 "m" / "s"`."""
        if not _DIGIT.search(self._text, start, self._position):
            return False
        position = self._position
        is_unit = self._take(_UNIT) is not None
        if not is_unit:
            self._position = position
        return is_unit

    def _times(self, value: _Formula, start: int) -> _Formula:
        self._skip_spaces()
        before, after = self._text[: self._position].rstrip()[-1:], self._text[self._position]
        if after.isdigit() and (before.isdigit() or before == '"'):
            raise _NotAFormula("two numbers in a row")
        factor = self._factor()
        if isinstance(value, _Expression) and value.name and (isinstance(factor, _Collection) or after == "("):
            name = self._text[start : self._position]
            if isinstance(factor, _Collection):
                return _variable(name)
            return _Expression(self._apply(operator.mul, value, factor).values, name)
        return self._apply(operator.mul, value, factor)

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
        return self._signed(self._atom)

    def _atom(self) -> _Formula:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _NotAFormula("nested too deeply")
        atom = self._read_atom()
        self._depth -= 1
        return atom

    def _read_atom(self) -> _Formula:
        if found := self._take(_REPEATING):
            return _constant(_repeating(*found.groups()))
        if found := self._take(_MIXED):
            whole, above, below = (int(part) for part in found.groups() if part)
            if below == 0:
                raise _NotAFormula("division by zero")
            return _constant(whole + Fraction(above, below))
        if found := self._take(_NUMBER):
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
        if found := self._take(_NAME):
            return _variable(found[1] or found[2].casefold())
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
        if name in ("pmatrix", "bmatrix", "vmatrix"):
            return self._matrix("determinant" if name == "vmatrix" else "matrix")
        if name in _GREEK:
            return self._letter(name)
        raise _NotAFormula(name)

    def _matrix(self, kind: str) -> _Formula:
        rows = [[self._sum()]]
        while not self._take_text("\\end"):
            if self._take_text("&"):
                rows[-1].append(self._sum())
            else:
                self._require("\\\\")
                if not self._is_before(_END):
                    rows.append([self._sum()])
        return _Collection(kind, tuple(_Collection("row", tuple(row)) for row in rows))

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


def _equal(left: _Formula, right: _Formula) -> bool:
    if isinstance(left, _Relation) and isinstance(right, _Relation):
        return _equal_relations(left, right)
    if isinstance(left, _Relation):
        return _equal(_result(left), right)
    if isinstance(right, _Relation):
        # the right side of `x^2 + y^2 = 4` is not the result
        states_result = not isinstance(right.sides[0], _Expression) or bool(right.sides[0].name)
        return states_result and _equal(left, _result(right))
    if isinstance(left, _Expression) and isinstance(right, _Expression):
        return _equal_values(left, right)
    left, right = _without_signs(left), _without_signs(right)
    if not (isinstance(left, _Collection) and isinstance(right, _Collection)):
        return False
    kinds = {left.kind, right.kind}
    if kinds <= _UNORDERED:
        return all(any(_equal(item, other) for other in right.items) for item in left.items) and all(
            any(_equal(item, other) for item in left.items) for other in right.items
        )
    if len(left.items) != len(right.items) or not (len(kinds) == 1 or kinds == {"list", "()"}):
        return False
    return all(map(_equal, left.items, right.items))


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
        return cmath.isclose(complex(one), complex(other), rel_tol=1e-11, abs_tol=1e-12)
    except OverflowError:  # an exact number beyond the range of floats
        return False


def _result(relation: _Relation) -> _Formula:
    """The last side of equations, or the interval of `x < 3` or `1 \\le x < 3`.

    Raises:
        _NotAFormula: the relation has another form.
    """
    operators, sides = relation.operators, relation.sides
    if set(operators) == {"="}:
        return sides[-1]
    if set(operators) <= {">", "ge"}:
        operators = tuple({">": "<", "ge": "le"}[each] for each in reversed(operators))
        sides = tuple(reversed(sides))
    if not set(operators) <= {"<", "le"}:
        raise _NotAFormula("no interval")
    names = [isinstance(side, _Expression) and bool(side.name) for side in sides]
    opening = {"<": "(", "le": "["}[operators[0]]
    closing = {"<": ")", "le": "]"}[operators[-1]]
    if names == [True, False]:
        return _Collection("(" + closing, (_constant(-math.inf), sides[1]))
    if names == [False, True]:
        return _Collection(opening + ")", (sides[0], _constant(math.inf)))
    if names == [False, True, False]:
        return _Collection(opening + closing, (sides[0], sides[2]))
    raise _NotAFormula("no interval")


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
    differences = [_apply(operator.sub, *relation.sides) for relation in (left, right)]
    ratios = [ratio for ratio in _apply(operator.truediv, *differences).values if ratio is not None]
    is_directed = left.operators[0] in ("<", "le")
    return (
        len(ratios) >= MIN_DEFINED
        and all(_is_close(ratio, ratios[0]) for ratio in ratios)
        and ratios[0] != 0
        and (not is_directed or (not isinstance(ratios[0], complex) and ratios[0] > 0))
    )
