"""Numbers as people and models write them in prose, read exactly.

Answers may be hostile: every pattern here takes time linear in the text, and no number is computed that is too big.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_NUMBER_CHARS = 300
MAX_EXPONENT = 300
"""Past these a number is none: exact arithmetic with it would take time and memory without bound."""

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
# a minus after an operand subtracts, so it is no sign
_NUMBER = re.compile(
    rf"(?<![A-Za-z0-9_])(?:(?<![)])(?P<sign>[-+]))?(?:"
    rf"(?:(?P<whole>{_DIGITS}) )?(?P<above>{_DIGITS}) ?/ ?(?P<below>{_DIGITS})(?!\.?[0-9])"
    rf"|(?P<decimal>(?:{_DIGITS}(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)(?:[eE][-+]?[0-9]+)?))"
)

_PLAINER = [
    (re.compile("[\u2010-\u2013\u2212\ufe63\uff0d]"), "-"),  # hyphens, en dash, minus signs
    (re.compile("[\u00a0\u2009\u202f]"), " "),
    (re.compile(r"\\[,!;: ]"), ""),
    (re.compile(r"\{,\}(?=[0-9]{3})"), ","),
    # the square of a unit: \text{cm}^2, cm^2
    (re.compile(r"\\(?:text|mathrm|mbox)\{([^{}0-9]{1,20}[A-Za-z~ ])\} ?\^(?:[23]|\{[23]\})"), r" \1 "),
    (re.compile(r"(?<![A-Za-z\\])((?:[cdkm]?m|in|ft|yd|mi|inch(?:es)?|feet|units?) ?)\^(?:[23]|\{[23]\})"), r"\1"),
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\[dt]?frac\{ ?(-?[0-9]+) ?\}\{ ?([0-9]+) ?\}|\\[dt]?frac([0-9])([0-9])"), r" \1\3/\2\4 "),
    (re.compile(r"\\[()\[\]]|\\left(?![a-z])|\\right(?![a-z])"), " "),
    (re.compile(r"\^\{?\\circ\}?|\\?%|\u00b0"), " "),
    (re.compile(r"-\\?[$\u20ac\u00a3\u00a5\u20b9] ?"), "-"),
    (re.compile(r"\\?[$\u20ac\u00a3\u00a5\u20b9]"), " "),
    (re.compile(r" ?(?:\u00d7|\*|\\times|\\cdot) ?10 ?(?:\^|\*\*) ?\{?([-+]?[0-9]{1,4})\}?"), r"e\1"),
    # emphasis, and not the power of 2**3 and the product of 2*3
    (
        re.compile(
            r"(?<![A-Za-z0-9)])(?:\*{1,3}|_{1,3})([^*_\s](?:[^*_\n]*[^*_\s])?)(?:\*{1,3}|_{1,3})(?![A-Za-z0-9(])"
        ),
        r"\1",
    ),
    (re.compile(r"`"), ""),
]
_POWERS = {"thousand": "e3", "million": "e6", "billion": "e9"}
_SCALE = re.compile(rf"(?<=[0-9]) {{0,4}}({'|'.join(_POWERS)})s?\b", re.IGNORECASE)


def plain_text(text: str) -> str:
    """The text without LaTeX, Markdown, currency and percent signs around its numbers: `\\$1{,}250` is `1,250`."""
    for pattern, replacement in _PLAINER:
        text = pattern.sub(replacement, text)
    return text


def scaled_text(text: str) -> str:
    """The plain text with powers of ten for the words: `1.5 million` is `1.5e6`."""
    return _SCALE.sub(lambda word: _POWERS[word[1].lower()], text)


def first_number(text: str) -> Fraction | None:
    """The first number of a plain text; None where there is none, or where it is too big or divided by zero."""
    match = _NUMBER.search(text)
    return None if match is None else _value(match)


def last_number(text: str) -> Fraction | None:
    """The last number of a plain text; None where there is none, or where it is too big or divided by zero."""
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return None if last is None else _value(last)


def without_numbers(text: str) -> str:
    """The plain text with `0` in the place of each number."""
    return _NUMBER.sub("0", text)


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > MAX_NUMBER_CHARS:
        return None
    sign = -1 if match["sign"] == "-" else 1
    if match["decimal"]:
        return _decimal(match["decimal"].replace(",", ""), sign)
    whole, above, below = (int((match[part] or "0").replace(",", "")) for part in ("whole", "above", "below"))
    return None if below == 0 else sign * (whole + Fraction(above, below))


def _decimal(digits: str, sign: int) -> Fraction | None:
    mantissa, _, exponent = digits.lower().partition("e")
    if len(exponent) > MAX_NUMBER_CHARS or abs(int(exponent or "0")) > MAX_EXPONENT:
        return None
    return sign * Fraction(mantissa) * Fraction(10) ** int(exponent or "0")
