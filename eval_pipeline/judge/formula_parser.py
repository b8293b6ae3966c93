"""Parses formulas in LaTeX or plain notation and computes their values."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial

from eval_pipeline.judge.formula_values import (
    FUNCTIONS,
    NUM_POINTS,
    Collection,
    Expression,
    Formula,
    NotAFormula,
    Relation,
    add,
    apply,
    binomial,
    call,
    constant,
    factorial,
    log,
    power,
    reals_without,
    root,
    rounded,
    subtract,
    variable,
)

MAX_DEPTH = 25

# Notation

_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell hbar".split()
)
UNITS = {
    word: words.split()[0]
    for words in (
        "mm millimeter millimeters", "cm centimeter centimeters", "m meter meters", "km kilometer kilometers",
        "in inch inches", "ft foot feet", "yd yard yards", "mi mile miles", "unit units",
        "s sec second seconds", "min minute minutes", "h hr hour hours", "day days", "week weeks", "month months",
        "yr year years", "mg milligram milligrams", "g gram grams", "kg kilogram kilograms", "lb lbs pound pounds",
        "oz ounce ounces", "ton tons", "deg degree degrees", "rad radian radians", "dollar dollars", "cent cents",
        "ml milliliter milliliters", "l liter liters litre litres", "gal gallon gallons", "per", "percent",
        "mol mole moles",
    )
    for word in words.split()
}  # fmt: skip

_SIGNS = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u00d7": "*", "\u00b7": "*", "\u22c5": "*", "\u00f7": "/", "\u2044": "/",
        "\u2264": "\\le ", "\u2265": "\\ge ", "\u2260": "\\ne ", "\u2248": "=", "\u00b1": "\\pm ", "\u2213": "\\mp ",
        "\u221e": "\\infty ", "\u222a": "\\cup ", "\u2208": "\\in ", "\u2205": "\\emptyset ", "\u03c0": "\\pi ",
        "\u221a": "\\sqrt ", "\u211d": "\\R ", "\u00b0": "\\degree ", "\u00b2": "^2", "\u00b3": "^3", "\u2074": "^4",
        "\u2075": "^5", "\u2076": "^6", "\u2077": "^7", "\u2078": "^8", "\u2079": "^9", '"': " ", "~": " ", "$": " ",
        "\u2124": "Z",
    }
)  # fmt: skip
# 0.1666..., with a period of at most six digits
PERIODIC = re.compile(
    r"(?<![0-9.])([0-9]{0,9}\.[0-9]{0,6}?)([0-9]{1,6}?)\2{1,20}(?:\.\.\.|\u2026|\\[lc]?dots(?![A-Za-z]))"
)
# {x | x > 2}
_SET_BUILDER = re.compile(
    r"^\s{0,3}\\\{\s{0,3}([a-z])\s{0,3}(?:\\in\s{0,3}\\R\s{0,3})?(?:\||:|\\mid(?![a-z]))((?=[^|:{}]*\1)[^|:{}]*)\\\}\s{0,3}$"
)
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
    (PERIODIC, r"\1\\overline{\2}"),
    (re.compile(r"(?<=\S) ?[,;(]? ?[kmn] ?\\in ?(?:Z|\\mathbb ?\{?Z\}?)\)?$"), ""),
    (re.compile(r"\\mathbb\s?\{?R\}?"), r"\\R "),
    (re.compile(r"\\overline\s?\{([A-Z]{2})\}"), r" \1 "),  # a segment; a bar over one letter is a conjugate
    (re.compile(r"\\(mathbb|vec|hat|dot|bar|overline)\s?(?:\{([A-Za-z]{1,3})\}|([A-Za-z]))"), r" \2\3_{\1}"),
    (re.compile(r"\\(?:dfrac|tfrac|cfrac)"), r"\\frac"),
    (re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"^([^{}]*)\\over(?![A-Za-z])([^{}]*)$"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\[dt]binom"), r"\\binom"),
    (re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\(?:leqslant|leq)(?![A-Za-z])|<="), r"\\le "),
    (re.compile(r"\\(?:geqslant|geq)(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])|!="), r"\\ne "),
    (re.compile(r"\\approx(?![A-Za-z])"), "="),
    (re.compile(r"\\(?:land|wedge)(?![A-Za-z])"), r"\\and "),
    (re.compile(r"\\(?:lor|vee)(?![A-Za-z])"), r"\\or "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])"), "*"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\(?:smallsetminus|backslash)(?![A-Za-z])"), r"\\setminus "),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\[lr]?vert(?![A-Za-z])"), "|"),
    (re.compile(r"\\l?brace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\^\s?(?:\\circ|\{\s?\\circ\s?\})"), r"\\degree "),
    (re.compile(r"\\?%"), " "),
    (re.compile(r"(?<=[0-9]) x (?=[0-9])"), "*"),
    (re.compile(r"(?<=[0-9]) ?(?:\\text\{ ?to ?\}|to) ?(?=[0-9])"), ":"),
    (re.compile(r"\\begin\{[bp]matrix\}|[(\[] ?\\begin\{(?:small)?matrix\}"), r"\\matrix "),
    (re.compile(r"\\end\{[bp]matrix\}|\\end\{(?:small)?matrix\} ?[)\]]"), r"\\end "),
    (re.compile(r"(?<=\\\\)\[[0-9.]{1,5} ?(?:pt|em|ex|mm|cm)\]"), ""),
    (re.compile(r"[(\[] ?\\begin\{array\}\s?\{[lcr ]*\}"), r"\\matrix "),
    (re.compile(r"\\end\{array\} ?[)\]]"), r"\\end "),
    (re.compile(r"(?<=[\])}]) ?U ?(?=[\[({\\])"), r"\\cup "),
    (re.compile(r"(?<![A-Za-z\\])(?:square|sq\.?) ([a-z]{1,20})"), r"\1^2"),
    (re.compile(r"(?<![A-Za-z\\])cubic ([a-z]{1,20})"), r"\1^3"),
    (re.compile(r"(?<=[a-z]) squared(?![a-z])"), "^2"),
    (re.compile(r"(?<=[a-z]) cubed(?![a-z])"), "^3"),
    (re.compile(r"(?<![a-z])mph(?![a-z])"), "miles/hour"),
    (re.compile(r"(?<=[a-z]) per (?=[a-z])"), "/"),
]
# units behind a number: 9.8 m/s^2, 5 \text{kg}*\text{m}^2, 3 \frac{m}{s}
_TEXT = r"\\(?:text|textrm|mathrm|mbox|operatorname)\s?"
_SYMBOL = (
    r"(?:[cdkmnGM]?(?:m|g|s|N|J|W|V|A|Pa|Hz|mol|K|C|L|l|eV)|kWh|h|hr|hours?|min|minutes?|sec|seconds?|day|year|yr"
    r"|meters?|metres?|ft|feet|in|mi|miles?|lbs?)(?![A-Za-z])"
)
_POWER = r"(?: ?\^ ?(?:-?[1-9]|\{ ?-?[1-9] ?\}))?"
_PRODUCT = rf"{_SYMBOL}{_POWER}(?:(?: ?[/*] ?| | per ){_SYMBOL}{_POWER}){{0,4}}"
_UNIT_FACTOR = rf"(?:{_TEXT}\{{ ?{_PRODUCT} ?\}}|{_SYMBOL}){_POWER}"
_UNIT_FRACTION = re.compile(rf"\\frac ?\{{ ?({_UNIT_FACTOR}) ?\}} ?\{{ ?({_UNIT_FACTOR}) ?\}}")
_UNITS_BEHIND_NUMBER = re.compile(
    rf"(?<=[0-9}}])( ?)({_UNIT_FACTOR}(?:(?: ?[/*] ?| ){_UNIT_FACTOR}){{0,4}})(?= ?(?:$|[,;=)\]}}]))"
)
_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?")
_THOUSANDS = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]*)?")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot) ?\{?([0-9]+)\}?")
_MIXED = re.compile(
    r"([0-9]+) ?(?:\\frac ?(?:\{ ?([0-9]+) ?\}|([0-9])) ?(?:\{ ?([0-9]+) ?\}|([0-9]))| ([0-9]+) ?/ ?([0-9]+))"
)
_DIGIT = re.compile(r"[0-9]")
_CONSTANT = re.compile(r"[0-9]|\\pi")
_FUNCTIONS_PATTERN = "|".join([*sorted(FUNCTIONS, key=len, reverse=True), "log", "lg"])
_FUNCTION = re.compile(rf"\\?({_FUNCTIONS_PATTERN})(?![A-Za-z])")
_PLAIN_NAMES = "|".join(["sqrt", "pi", "infinity", "infty", "or", "and", *(name for name in _GREEK if len(name) > 3)])
_PLAIN_COMMAND = re.compile(rf"(?<![A-Za-z\\])({_PLAIN_NAMES})(?![A-Za-z])")
_PLAIN_COMMANDS = {"infinity": "infty"}
PROSE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,} [A-Za-z]{2,}")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_QUOTED = re.compile(r'"([^"]*)"')
_WORD = re.compile(r"[A-Za-z]{4,}")
_BEFORE_WORD = re.compile(r"(?:^|[=,;:(\[{<>]|\\(?:or|and|in|le|ge|ne))\s*$")
_AFTER_WORD = re.compile(r"\s*(?:$|[=,;:)\]}<>]|\\(?:or|and|in|le|ge|ne)(?![A-Za-z]))")
_APPLIED = re.compile(r"\s*[fghpqFGHPQ]'*(?:_\S+)? ?\([A-Za-z0-9., ]*\)")
_LETTER = re.compile(r"([A-Za-z])")
_LETTER_LIST = re.compile(r"[A-Z](?:(?:, | and | or |, and |, or )[A-Z])+")
_SUFFIX = re.compile(r" ?(?:_ ?(?:\{([^{}]*)\}|([A-Za-z0-9]))|('+))")
IMAGINARY = re.compile(r"(?<![A-Za-z\\])(?:i|cis)(?![A-Za-z])")
_RELATION = re.compile(r"([=<>])|\\(le|ge|ne|in)(?![A-Za-z])")
_SEPARATOR = re.compile(r"[,;]|\\(?:or|and)(?![A-Za-z])")
_CUP = re.compile(r"\\cup(?![A-Za-z])")
_SETMINUS = re.compile(r"\\setminus(?![A-Za-z])|-")
_PLUS_MINUS = re.compile(r"([-+])|\\(pm|mp)(?![A-Za-z])")
_CLOSING = re.compile(r"\\?[\])}]|\\rangle(?![A-Za-z])")
_OPENING_BRACKET = re.compile(r"\[")
_FACTOR = re.compile(
    r'[0-9A-Za-z({".]|\\\{|\\(?!(?:le|ge|ne|in|or|and|cup|setminus|pm|mp|end|rangle|rfloor|rceil|degree)(?![A-Za-z]))[A-Za-z]'
)
_NO_FACTOR = re.compile(r"(?:[0-9]|(?<![A-Za-z\\])[A-Za-z]+)\s*$")
_END = re.compile(r"\\end")
_BRACE = re.compile(r"\{")
_PARENTHESIS = re.compile(r"\(")
_REALS = Collection("()", (constant(-math.inf), constant(math.inf)))
_UNIT = re.compile(
    r' ?(/?) ?(?:"([^"]*)"|(?<![A-Za-z0-9])([A-Za-z]+)(?![A-Za-z(_]))(?: ?\^ ?(-?[1-9]|\{ ?-?[1-9] ?\})(?![0-9.]))?'
)
_UNIT_PART = re.compile(r"(/)|\^ ?\{? ?(-?[1-9])|([a-z]+)")
_NOUN = re.compile(r"(?!(?:is|are|was|were|not|times|thirds)(?![a-z]))[a-z]+(?:[ /*^{}0-9-]+[a-z]+)*[ ^{}0-9-]*")
_OPENING = {"(": "(", "[": "[", "{": "", "\\{": "{", "\\langle": "(", "]": "]"}
_CLOSED = {")": ")", "]": "]", "}": "", "\\}": "}", "\\rangle": ")", "[": "["}


def normalize(text: str, with_units: bool = True) -> str:
    """The text with one notation for each sign, and words in quotes.

    Args:
        text: a formula.
        with_units: whether `9.8 m/s^2` and `5 \\text{m}` contain units. Otherwise, their letters are variables.
    """
    text = text.translate(_SIGNS)
    for pattern, replacement in _SYNONYMS:
        text = pattern.sub(replacement, text)
    if with_units:
        text = _UNITS_BEHIND_NUMBER.sub(_quote_units, _UNIT_FRACTION.sub(r"\1/\2", text))
    text = _WORDS.sub(_quote, text)
    text = _PLAIN_COMMAND.sub(lambda word: rf"\{_PLAIN_COMMANDS.get(word[1], word[1])} ", text)
    text = _SET_BUILDER.sub(r"\2", text)
    return " ".join(text.split()).rstrip(".")


def _quote(words: re.Match[str]) -> str:
    text = words[1].strip()
    is_formula = text[0:1] in "0123456789." or _FUNCTION.fullmatch(text) or _LETTER_LIST.fullmatch(text)
    if len(text) < 2 or is_formula or text in ("or", "and"):
        return f" {text} "
    return f' "{text.casefold()}" '


def _quote_units(found: re.Match[str]) -> str:
    """Quote words in `\\text`, and units such as `m/s` and `kg m` behind a space; other letters may be variables."""
    space, units = found.groups()
    is_word = "\\" in units
    is_compound = re.fullmatch(_SYMBOL + _POWER, units) is None and re.search(r"[-/]|[A-Za-z]{2}", units) is not None
    if not is_word and not (space and is_compound):
        return found[0]
    words = re.sub(rf"{_TEXT}|[{{}}]", "", units).strip()
    return f' "{words.casefold()}" '


class Parser:
    """Computes a formula while reading it.

    Args:
        text: a normalized formula.
        is_complex: whether roots and logarithms may be complex.
        tight: whether `a/bc` means `a/(bc)`.
        joins: whether `1,234` is a number and not a list.

    Attributes:
        units: the ignored units and their powers: 1 for `m` and -2 for `s` in `m/s^2`.
    """

    def __init__(self, text: str, is_complex: bool, tight: bool, joins: bool) -> None:
        self.units: Counter[str] = Counter()
        self._text = text
        self._position = 0
        self._unit_end = -1
        self._tight = tight
        self._joins = joins
        self._is_complex = is_complex
        self._apply = partial(apply, is_complex=is_complex)
        self._depth = 0
        self._bars = 0
        self._arguments = 0

    def parse(self) -> Formula:
        """Return the value of the whole text.

        Raises:
            NotAFormula: the text has a syntax or a meaning that this module does not know.
        """
        formula = self._items()
        if self._rest():
            raise NotAFormula(self._rest())
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
            raise NotAFormula(f"no {text} before {self._rest()}")

    def _is_before(self, pattern: re.Pattern[str]) -> bool:
        self._skip_spaces()
        return pattern.match(self._text, self._position) is not None

    # from the loosest to the tightest binding

    def _items(self) -> Formula:
        if self._depth and self._is_before(_CLOSING):
            items: list[Formula] = []
        else:
            items = [self._relation()]
            if self._take_text(":"):
                items = [Collection(":", (items[0], self._relation()))]
        separators: set[str] = set()
        while found := self._take(_SEPARATOR):
            last = self._take(_SEPARATOR) or found  # `1, 2, and 3`
            separators.add(last[0])
            items.append(self._relation())
        if len(items) == 1:
            return items[0]
        return Collection(_kind_of(items, separators), tuple(items))

    def _relation(self) -> Formula:
        sides, operators = [self._union()], []
        while found := self._take(_RELATION):
            operators.append(found[1] or found[2])
            sides.append(self._union())
        if not operators:
            return sides[0]
        if operators == ["in"]:
            return sides[1]
        return Relation(tuple(operators), tuple(sides))

    def _union(self) -> Formula:
        parts = [self._sum()]
        if parts[0] == _REALS and self._take(_SETMINUS):
            removed = self._sum()
            points = removed.items if isinstance(removed, Collection) and removed.kind == "set" else (removed,)
            remaining = reals_without(points)
            if remaining is None:
                raise NotAFormula("the real numbers without something else than numbers")
            return remaining
        while self._take(_CUP):
            parts.append(self._sum())
        if len(parts) == 1:
            return parts[0]
        sets = [part for part in parts if isinstance(part, Collection) and part.kind == "set"]
        if len(sets) == len(parts):
            return Collection("set", tuple(item for part in sets for item in part.items))
        return Collection("union", tuple(parts))

    def _sum(self) -> Formula:
        total = self._signed(self._term)
        while total != _REALS and (found := self._take(_PLUS_MINUS)):
            total = self._add(total, found[0], self._term())
        return total

    def _signed(self, operand: Callable[[], Formula]) -> Formula:
        found = self._take(_PLUS_MINUS)
        if found is None or found[0] == "+":
            return operand()
        return self._add(constant(Fraction(0)), found[0], operand())

    def _add(self, left: Formula, sign: str, right: Formula) -> Formula:
        if sign == "+":
            return self._apply(add, left, right)
        if sign == "-":
            return self._apply(subtract, left, right)
        plus, minus = self._apply(add, left, right), self._apply(subtract, left, right)
        upper, lower = (plus, minus) if sign == "\\pm" else (minus, plus)
        return Expression(upper.values[:NUM_POINTS] + lower.values[NUM_POINTS:])

    def _term(self) -> Formula:
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
        if not _CONSTANT.search(self._text, start, position):
            return False
        found = self._take(_UNIT)
        words = (found[2] if found[2] is not None else found[3]).casefold() if found else ""
        units = [UNITS.get(word) for word in re.split(r"[^a-z]+", words) if word]
        is_variable = found is not None and found[2] is None and len(words) < 2 and not follows_unit
        if found is not None and None in units and self._is_noun(found):
            units, words = [words], words.strip().removesuffix("s")
        if found is None or is_variable or (found[1] and not follows_unit) or not units or None in units:
            self._position = position
            return False
        self.units.update(_powers(words, found[1], found[4] or ""))
        self._unit_end = self._position
        return True

    def _is_noun(self, unit: re.Match[str]) -> bool:
        """Whether an unknown unit is a word such as `ways`: quoted, or the last of the text."""
        return _NOUN.fullmatch(unit[2]) is not None if unit[2] is not None else len(unit[3]) > 3 and not self._rest()

    def _times(self, value: Formula, start: int) -> Formula:
        self._skip_spaces()
        after = self._text[self._position]
        is_variable = isinstance(value, Expression) and bool(value.name)
        if after.isdigit() and (_NO_FACTOR.search(self._text[: self._position]) or self._unit_end >= start):
            raise NotAFormula("a number after a number, a variable or a unit")
        factor = self._factor()
        if is_variable and (after == "(" or isinstance(factor, Collection)):
            name = self._text[start : self._position]
            if isinstance(factor, Collection):
                return variable(name)
            values = self._apply(operator.mul, value, factor).values
            return Expression(values, name if _APPLIED.fullmatch(name) else "")
        return self._multiply(value, factor)

    def _multiply(self, left: Formula, right: Formula) -> Formula:
        """The product of two expressions, or of a matrix and an expression."""
        for matrix, factor in ((left, right), (right, left)):
            if isinstance(matrix, Collection) and matrix.kind in ("matrix", "row") and isinstance(factor, Expression):
                return Collection(matrix.kind, tuple(self._multiply(item, factor) for item in matrix.items))
        return self._apply(operator.mul, left, right)

    def _factor(self) -> Formula:
        base = self._atom()
        while True:
            if self._take_text("!!"):
                raise NotAFormula("a double factorial")
            if self._take_text("!"):
                base = self._apply(factorial, base)
            elif self._take_text("\\degree"):
                if self._arguments:
                    base = self._apply(operator.mul, base, constant(math.pi / 180))
            elif self._take_text("^"):
                base = self._apply(power, base, self._exponent())
            else:
                return base

    def _exponent(self) -> Formula:
        return self._signed(partial(self._atom, may_be_mixed=False))

    def _atom(self, may_be_mixed: bool = True) -> Formula:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotAFormula("nested too deeply")
        atom = self._read_atom(may_be_mixed)
        self._depth -= 1
        return atom

    def _read_atom(self, may_be_mixed: bool) -> Formula:
        if found := self._take(_REPEATING):
            return constant(_repeating(*found.groups()))
        if may_be_mixed and (found := self._take(_MIXED)):
            whole, above, below = (int(part) for part in found.groups() if part)
            if below == 0:
                raise NotAFormula("division by zero")
            return constant(whole + Fraction(above, below))
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
            return replace(variable(found[1]), is_word=True)
        if found := self._take_lone_word():
            return replace(variable(found[0].casefold()), is_word=True)
        if found := self._take(_LETTER):
            return self._letter(found[1])
        raise NotAFormula(self._rest())

    def _number(self, digits: str) -> Formula:
        value = Fraction(digits.replace(",", ""))
        if found := self._take(_SUFFIX):
            base = found[1] or found[2]
            if not base or not base.isdigit():
                raise NotAFormula("subscript of a number")
            return Collection("base", (constant(value), constant(Fraction(base))))
        return constant(value)

    def _take_lone_word(self) -> re.Match[str] | None:
        """Take a word that is all of a side or an item; other words are products of variables."""
        self._skip_spaces()
        found = _WORD.match(self._text, self._position)
        if found is None or not _BEFORE_WORD.search(self._text[: found.start()]):
            return None
        return self._take(_WORD) if _AFTER_WORD.match(self._text, found.end()) else None

    def _letter(self, letter: str) -> Formula:
        name = letter
        while found := self._take(_SUFFIX):
            name += found[0].strip().replace("{", "").replace("}", "").replace(" ", "")
        if name == "e":
            return constant(math.e)
        if name == "i" and self._is_complex:
            return constant(1j)
        return variable(name)

    def _group(self, opening: str) -> Formula:
        bars, self._bars = self._bars, 0
        inside = self._items()
        self._bars = bars
        found = self._take(_CLOSING) or self._take(_OPENING_BRACKET)
        if found is None:
            raise NotAFormula("an open bracket")
        closing = _CLOSED[found[0]]
        is_list = isinstance(inside, Collection) and inside.kind == "list"
        items = inside.items if isinstance(inside, Collection) and is_list else (inside,)
        if opening == "]" or closing == "[":  # ISO 31-11: `[2,5[` is `[2,5)`, and `]2,5]` is `(2,5]`
            if len(items) != 2:
                raise NotAFormula("reversed brackets around something else than an interval")
            opening, closing = opening.replace("]", "("), closing.replace("[", ")")
        if opening == "{" or closing == "}":
            if (opening, closing) != ("{", "}"):
                raise NotAFormula("unequal braces")
            return Collection("set", items)
        if is_list and opening:
            kind = opening + closing
            rows = [item.items for item in items if isinstance(item, Collection) and item.kind == kind == "[]"]
            if len(rows) == len(items):  # [[1,2],[3,4]]
                return Collection("matrix", tuple(Collection("row", row) for row in rows))
            return Collection(kind, items)
        if opening + closing not in ("", "()", "[]"):
            raise NotAFormula("unequal brackets")
        return inside

    def _argument(self) -> Formula:
        """An argument of a LaTeX command: a group, a digit, or a factor."""
        if self._take_text("{"):
            return self._group("")
        if found := self._take(_DIGIT):
            return constant(Fraction(found[0]))
        return self._atom()

    def _command(self, name: str) -> Formula:
        if name == "frac":
            return self._apply(operator.truediv, self._argument(), self._argument())
        if name == "binom":
            return self._apply(binomial, self._argument(), self._argument())
        if name == "sqrt":
            degree: Formula = constant(Fraction(2))
            if self._take_text("["):
                degree = self._sum()
                self._require("]")
            radicand = self._number(found[0]) if (found := self._take(_NUMBER)) else self._argument()
            return self._apply(root, radicand, degree)
        if name == "pi":
            return constant(math.pi)
        if name == "infty":
            return constant(math.inf)
        if name == "emptyset":
            return Collection("set", ())
        if name == "R":
            return _REALS
        if name in ("lfloor", "lceil"):
            inside = self._sum()
            self._require("\\rfloor" if name == "lfloor" else "\\rceil")
            return self._apply(partial(rounded, math.floor if name == "lfloor" else math.ceil), inside)
        if name == "matrix":
            return self._matrix()
        if name in _GREEK:
            return self._letter(name)
        raise NotAFormula(name)

    def _matrix(self) -> Formula:
        rows = [[self._sum()]]
        while not self._take_text("\\end"):
            if self._take_text("&"):
                rows[-1].append(self._sum())
            else:
                self._require("\\\\")
                if not self._is_before(_END):
                    rows.append([self._sum()])
        return Collection("matrix", tuple(Collection("row", tuple(row)) for row in rows))

    def _function(self, name: str) -> Formula:
        base: Formula = constant(Fraction(10))
        exponent: Formula | None = None
        if name == "log" and self._take_text("_"):
            base = self._argument()
        if self._take_text("^"):
            exponent = self._exponent()
            if name in _INVERSES and isinstance(exponent, Expression) and exponent.values[0] == -1:
                name, exponent = _INVERSES[name], None
        self._arguments += 1
        argument = self._function_argument()
        self._arguments -= 1
        if name in ("log", "lg"):
            value = self._apply(log, argument, base)
        else:
            value = self._apply(partial(call, FUNCTIONS[name]), argument)
        return value if exponent is None else self._apply(power, value, exponent)

    def _function_argument(self) -> Formula:
        """`(x+1)`, or a product up to the next sign or function: `\\sin 2x`.

        A power behind a parenthesis is one of the value: `\\sin(x)^2` is `(\\sin x)^2`.
        """
        if self._is_before(_PARENTHESIS):
            argument = self._atom()
            in_degrees = self._take_text("\\degree")
            return self._apply(operator.mul, argument, constant(math.pi / 180)) if in_degrees else argument
        is_group = self._is_before(_BRACE)
        value = self._factor()
        while not is_group and self._is_before(_FACTOR) and not self._is_before(_FUNCTION):
            value = self._apply(operator.mul, value, self._factor())
        return value


def _kind_of(items: list[Formula], separators: set[str]) -> str:
    """`x = 1 and x = 2` is a list, but `x > 1 and x < 2`, and `x \\ne 1, x \\ne 2`, are both."""
    operators = {sign for item in items if isinstance(item, Relation) for sign in item.operators}
    if "=" in operators or not all(isinstance(item, Relation) for item in items):
        return "list"
    if separators == {"\\and"} or (operators == {"ne"} and "\\or" not in separators):
        return "and"
    return "or" if separators & {"\\and", "\\or"} else "list"


def _powers(words: str, slash: str, power: str) -> Counter[str]:
    """The powers of the units in `m/s^2`, behind a slash if there is one, and the last of them to a further power."""
    powers: list[tuple[str, int]] = []
    sign = -1 if slash else 1
    for found in _UNIT_PART.finditer(f"{words.strip()}^{power.strip('{} ')}" if power else words):
        if found[1] or found[3] == "per":
            sign = -1
        elif found[3]:
            powers.append((UNITS.get(found[3], found[3]), sign))
        elif powers:
            powers[-1] = powers[-1][0], powers[-1][1] * int(found[2])
    total: Counter[str] = Counter()
    for unit, exponent in powers:
        total[unit] += exponent
    return total


def _repeating(whole: str, fixed: str, repeated: str) -> Fraction:
    start = Fraction(int(whole + fixed or "0"), 10 ** len(fixed))
    return start + Fraction(int(repeated), 10 ** len(fixed) * (10 ** len(repeated) - 1))
