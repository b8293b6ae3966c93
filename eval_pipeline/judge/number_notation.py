"""Numbers as people and models write them: LaTeX, Markdown, units, currencies, thousands separators and words.

Answers may be hostile: every pattern takes time linear in the text, and numbers that are too big are not computed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

MAX_NUMBER_CHARS = 300
MAX_EXPONENT = 300
"""Larger numbers are ignored: exact arithmetic with them would take unbounded time and memory."""

_DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
# a minus after an operand subtracts, so it is not a sign
NUMBER = re.compile(
    rf"(?<![A-Za-z0-9_])(?:(?<![)])(?P<sign>[-+]))?(?:"
    rf"(?:(?P<whole>{_DIGITS}) )?(?P<above>{_DIGITS}) ?/ ?(?P<below>{_DIGITS})(?!\.?[0-9])"
    rf"|(?P<decimal>(?:{_DIGITS}(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)(?:[eE][-+]?[0-9]+)?))"
)

# 5 000, with any space between the digits
_SPACED_THOUSANDS = re.compile(r"(?<![0-9.,/])(?<![0-9] )[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9/]| [0-9])")


def _as_frac(vulgar: re.Match[str]) -> str:
    above, below = unicodedata.normalize("NFKC", vulgar[0]).split("\u2044")
    return rf"\frac{{{above}}}{{{below}}}"


def _as_power(superscript: re.Match[str]) -> str:
    digits = unicodedata.normalize("NFKC", superscript[0]).replace("\u2212", "-")
    return f"^{{{digits}}}"


_Replacements: TypeAlias = list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]]

# the beginning of a number or a root
_OPERAND = r"(?=[ $(]{0,3}\\?[$\u20ac\u00a3]?\.?[0-9]|[ $]{0,2}\\(?:[dt]?frac|sqrt|pi)(?![a-z]))"
_SIGN_WORDS: _Replacements = [
    (re.compile(r"\\(?:text|textbf|mathrm|mbox)\{ ?(negative|minus) ?\}", re.IGNORECASE), r"\1 "),
    (re.compile(rf"(?<![A-Za-z-])negative {{1,3}}{_OPERAND}", re.IGNORECASE), "-"),
    (
        re.compile(
            rf"((?:\A|[=:,.!?(\[{{>#\n]|\b(?:is|are|be|equals?|to|or|and))[ $\n]{{0,3}})minus {{1,3}}{_OPERAND}",
            re.IGNORECASE,
        ),
        r"\1-",
    ),
    (re.compile(rf"(?:(?<=[0-9)}}$])|(?<=[ ({{>$][a-z])) {{1,3}}minus {{1,3}}{_OPERAND}", re.IGNORECASE), " - "),
]
"""A minus after an operand subtracts: `10 minus 5`."""

TYPOGRAPHY: _Replacements = [
    (re.compile("[\u2010-\u2013\u2212\ufe63\uff0d]"), "-"),  # hyphens, en dash, minus signs
    (re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]{2,}|[\u2070\u00b9\u2074-\u2079]"), _as_power),
    (re.compile(r"[\u00a0\u2009\u202f]|(?<=[0-9-])~(?=[0-9])|\\text\{ *\}"), " "),
    (re.compile(r"(?<![^\s({$=:>])\u2014(?=\\?[$.]?[0-9]|\\[dt]?frac)"), "-"),  # an em dash as a sign
    # full-width signs, Chinese punctuation, and Chinese words for `minus` and `or`
    (re.compile("[\uff10-\uff19\uff05\uff09\uff1d]"), lambda char: unicodedata.normalize("NFKC", char[0])),
    (re.compile("[\uff0c\u3001]"), ", "),
    (re.compile("\uff08"), " ("),
    (re.compile("\u3002"), ". "),
    (re.compile(r"(?:\\text\{[\u8d1f\u8ca0]\}|[\u8d1f\u8ca0]) ?(?=\\?[$.]?[0-9])"), "-"),
    (re.compile(r"(?<=[0-9$}]) ?(?:\u6216\u8005?|\u548c) ?(?=\\|[-$0-9])"), " or "),
    (re.compile("[\u00bc-\u00be\u2150-\u215e]"), _as_frac),
    (re.compile("(?<=[0-9])\u2044(?=[0-9])"), "/"),
    # 0.123\,456 is one number, and 1\,1/2 has two
    (re.compile(r"\.[0-9]{1,20}(?:\\[,;: ][0-9]{3}){1,20}"), lambda digits: re.sub(r"\\.", "", digits[0])),
    (re.compile(r"(?<!\\)\\[,;: ](?=[A-Za-z\\])|(?<=[0-9])\\[,;: ](?=[0-9])"), " "),
    (re.compile(r"(?<!\\)\\[,!;: ]"), ""),
    (re.compile(r"\{,\}(?=[0-9]{3})|(?<=[0-9])['_](?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"(?<=[0-9])\{\.\}(?=[0-9])"), "."),
    (re.compile("\u2248|\u2261|\\\\(?:approx|simeq|equiv)(?![A-Za-z])"), "="),
    (re.compile(r"(?<!\\)\\[()\[\]]"), "$"),
    (re.compile(r"\\(?:left|right)(?=\s?\\?[()\[\]{}|])"), ""),
    (re.compile(r"\\(?:left|right|q?quad|displaystyle|[lL]arge|[hH]uge|small|checkmark)(?![a-z])"), " "),
    (re.compile(r"\\(?:nice|s|c)frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\\(?:phantom|(?:text)?color|hspace)\{[^{}]*\}"), ""),
    (re.compile(r"\\(?:bf|rm|it|sf|tt|bfseries|(?:black)?square|Box|qed)(?![A-Za-z])"), " "),
    (re.compile(r"\\(?:begin|end)\{(?:aligned|align\*?|gathered|split)\}"), " "),
    (re.compile(r"\\(?:bm|bold|pmb|emph|ensuremath|text(?:sf|tt|sc|normal)|math(?:sf|tt|normal))(?=\s?\{)"), r"\\text"),
    (re.compile(r"\\(?:text|mathbf|mathrm|boldsymbol)\{(?=\\|[0-9]{1,9}\\[a-z])"), "{"),
    (re.compile(r"\\colon(?![A-Za-z])|(?<=[0-9])\{:\}(?=[0-9])"), ":"),
    (
        re.compile(r"(?<![A-Za-z\\])C\(([0-9]{1,4}), ?([0-9]{1,4})\)|(?:\{\})?_\{?([0-9]{1,4})\}?C_\{?([0-9]{1,4})\}?"),
        r"\\binom{\1\3}{\2\4}",
    ),
    (re.compile(r"\\underline\{([^{}]*)\}"), r"\1"),
    # emphasis, and not the power of 2**3 and the product of 2*3
    (
        re.compile(
            r"(?<![A-Za-z0-9)])(?:\*{1,3}|_{1,3})([^*_\s](?:[^*_\n]*[^*_\s])?)(?:\*{1,3}|_{1,3})(?![A-Za-z0-9(])"
        ),
        r"\1",
    ),
    (re.compile(r"`|<[|\uff5c][^<>|\uff5c\s]{3,30}[|\uff5c]>|</s>|<eos>|<end_of_turn>"), ""),  # and end tokens
    (re.compile(r"<(-?[0-9][0-9,.]{0,20})>"), r"\1"),  # a placeholder such as <number>
    (re.compile(r"(?<![<=-])(?:=|-{1,2})> ?(?=[-+.0-9])"), " "),  # arrows
    # a sign, and not a bullet of a list
    (
        re.compile(
            r"((?:\\boxed\s{0,3}\{|[=:]|####|<answer>|\banswer is|(?:\A|(?<=[\s:(]))\${1,2}) {0,3}-) {1,3}"
            r"(?=\\?[$\u20ac\u00a3]?\.?[0-9]|\\[dt]?frac|[({])",
            re.IGNORECASE,
        ),
        r"\1",
    ),
    (re.compile(r"(?<![A-Za-z0-9)}])(?<![A-Za-z0-9)}] )-(\\f?box(?:ed)?\s{0,3}\{)(?=[0-9.]{1,20}\})"), r"\1-"),
    *_SIGN_WORDS,
]
PERMUTATIONS: _Replacements = [
    (
        re.compile(r"(?<![A-Za-z\\])P\(([0-9]{1,4}), ?([0-9]{1,4})\)|(?:\{\})?_\{?([0-9]{1,4})\}?P_\{?([0-9]{1,4})\}?"),
        r"\\frac{\1\3!}{(\1\3-\2\4)!}",
    ),
]
"""Numbers of permutations, `P(7,3)`. Only for a reference that is a number, because `P(7,3)` may also be a point."""
TEXT_COMMANDS: _Replacements = [
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\^\{?\\circ\}?|\\?%|\u00b0"), " "),
    (re.compile(r"\\?[$\u20ac\u00a3\u00a5\u20b9]"), " "),
]
_NUMBER_NOTATIONS: _Replacements = [
    # 5^{th}
    (re.compile(r"(?<=[0-9]) ?\^ ?\{? ?(?:\\(?:text|mathrm)\{)?(?:st|nd|rd|th)(?![A-Za-z])\}{0,2}"), " "),
    (re.compile(r"(?<=-)\\(?:text(?:bf)?|math(?:rm|bf))\{([0-9.,]{1,20})\}|(?:\\text)?\{(-)\}(?=[0-9])"), r"\1\2"),
    # the square of a unit: \text{cm}^2, cm^2
    (re.compile(r"\\(?:text|mathrm|mbox)\{([^{}0-9]{1,20}[A-Za-z~ ])\} ?\^(?:[23]|\{[23]\})"), r" \1 "),
    (
        re.compile(
            r"(?<![A-Za-z\\])((?:[cdkm]?m|in|ft|yd|mi|inch(?:es)?|feet|units?) ?)(?:\^(?:[23]|\{[23]\})|[\u00b2\u00b3])"
        ),
        r"\1",
    ),
    TEXT_COMMANDS[0],
    # 1\frac{1}{2} is 1 1/2, and the sign of -\frac{1}{2} stays
    (re.compile(r"(?<=[0-9]) {2,6}(?=\\[dt]?frac)|(?<![-+ ])(?=\\[dt]?frac)"), " "),
    (re.compile(r"\\[dt]?frac(?:\{ ?(-?[0-9]+) ?\}\{ ?([0-9]+) ?\}|([0-9])([0-9]))(?![A-Za-z(!])"), r"\1\3/\2\4 "),
    (re.compile(r"(/[0-9]+) ([-+])(?=[0-9])"), r"\1 \2 "),
    # 2 and a half
    (re.compile(r"(?<=[0-9]) {1,3}and a half\b"), " 1/2"),
    (re.compile(r"(?<=[0-9]) {1,3}and {1,3}(?=[1-9]/[1-9](?![0-9/]))"), " "),
    (re.compile(r"-\\?[$\u20ac\u00a3\u00a5\u20b9] ?"), "-"),
    # ohms, and micrometers and the like
    (
        re.compile(
            r"(?<=[0-9])[ ~]{0,3}\{?(?:\\(?:text|mathrm)\{ ?[kM] ?\}|[kM])? ?\\"
            r"(?:Omega|mu ?(?:\\(?:text|mathrm)\{)?[AFHJLNVWgmls]\}?)\}?(?![A-Za-z])"
        ),
        " ",
    ),
    *TEXT_COMMANDS[1:],
    (re.compile(r" ?(?:\u00d7|\*|\\times|\\cdot) ?10 ?(?:\^|\*\*) ?\{?([-+]?[0-9]{1,4})\}?"), r"e\1"),
]
PERCENT = re.compile(r"[0-9}] ?\\?%")
POWERS = {
    "hundred": "e2",
    "thousand": "e3",
    "million": "e6",
    "billion": "e9",
    "trillion": "e12",
    "\u4e07": "e4",
    "\u4ebf": "e8",
}
_SCALE = re.compile(rf"(?<=[0-9]) {{0,4}}({'|'.join(POWERS)})(?:s?\b|(?<=[\u4e07\u4ebf]))", re.IGNORECASE)


# Words around a number with which a text does not state the number

_NEGATED = (
    r"(?:\b(?:not|never|cannot|neither|nor|except(?: for)?|excluding|unlike|besides|(?:any|every)(?:thing|one)? but)"
    r"|n['\u2019]t)(?: (?:be|equals?|to|just|only|exactly|necessarily|simply))*|\u4e0d\u662f|\u5e76\u975e"
)
_BOUNDED = (
    r"(?<!\bnone other )\bthan(?: or equal to)?|\bat (?:most|least)|(?:^|\b(?:is|be|was) )up to"
    r"|\b(?:between|over|under|above|below|beyond|exceed(?:s|ing)?|differ(?:s|ent) from)"
    r"|[\u5c0f\u5927\u5c11\u591a]\u4e8e|\u8d85\u8fc7|\u81f3[\u5c11\u591a]"
)
_CHANGED = (
    r"\b(?:half|twice|double|triple|thrice)(?: of)?|\b(?:root|square|cube|third|quarter|reciprocal|inverse) of"
    r"|\b(?:per ?cent|percentage|multiple|divisor) of|\b(?:times|plus|(?:divided|multiplied) by|log|ln|sin|cos|tan)"
    r"|[0-9] of"
)
_MEMBER = r"(?:\bin(?: the set)?|\\in|\u2208)[ $]{0,2}\\?\{[^{}]{0,40}[,;]"
ALTERNATIVE = (
    r"\b(?:but|or|(?:al)?though)(?: (?:it|this|that))? (?:(?:could|might|may)(?: also)? be|maybe|perhaps|possibly)\b"
    r"(?! (?:[A-Za-z]{2}|an? ))"
)
"""Words between an answer and another one: `42, but it could be 43`, and not `but it could be simplified`."""
_BEFORE_UNSTATED = re.compile(rf"(?:{_NEGATED}|{_BOUNDED}|{_CHANGED}|{_MEMBER}|{ALTERNATIVE})[ ($]*$", re.IGNORECASE)
_COMPOUND = "|".join(
    rf"{large},?(?: {{1,3}}and)? {{1,3}}[0-9]{{1,9}}(?: {{0,3}}{small}\b|[.\s]*\Z)"  # the smaller unit may be cut off
    for large, small in (
        ("years?", "months?"),
        ("weeks?", "days?"),
        ("days?", "hours?"),
        ("(?:hours?|hrs?|h)", "(?:minutes?|mins?)"),
        ("(?:minutes?|mins?)", "(?:seconds?|secs?)"),
        ("(?:feet|foot|ft)", "(?:inch(?:es)?|in)"),
        ("(?:pounds?|lbs?)", "(?:ounces?|oz)"),
        ("dollars?", "cents?"),
    )
)
_COMPLETIONS = (
    r"(?:squared|cubed|factorial|halves|thirds|fourths|fifths|sixths|sevenths|eighths|ninths|tenths"
    r"|(?:ten-?|hundred-?)?(?:hundredths|thousandths|millionths))\b"
    r"|or (?:less|more|fewer|greater|higher|lower|above|below)\b|and (?:above|below|up)\b|and a (?:third|quarter)\b"
    r"|or (?:none|infinite)\b|at (?:most|least)\b|\u4ee5[\u4e0a\u4e0b]|remainder [0-9]"
    r"|(?:times|plus|minus|over|divided by) [0-9]|to the power of [0-9]"
    rf"|{_COMPOUND}"
    rf"|,? {{0,3}}{ALTERNATIVE}"
)
"""Words after a number with which a text states another one: `3 squared`, `3 or more`, `3 hours 20 minutes`."""
_DENIED = (
    r"[ )$*]{0,4}(?:\?|(?:is|are|was|were|would be)(?:n['\u2019]t\b| not\b"
    r"| (?:[a-z]{3,12}ly )?(?:wrong|incorrect|false|impossible|invalid)\b))"
)
_AFTER_UNSTATED = re.compile(
    rf" {{0,3}}(?:{_COMPLETIONS})|\+(?! ?\.?[0-9\\(]| ?[A-Za-z](?![a-z]))|{_DENIED}", re.IGNORECASE
)
_IS_DENIED = re.compile(_DENIED, re.IGNORECASE)
_BEFORE_CHARS = 60


_SIGNS_OF_UNITS = {
    unit: re.compile(pattern, re.IGNORECASE)
    for unit, pattern in {
        "degree": r"\\circ(?![a-z])|\\degree|\u00b0|(?<![a-z])deg(?:rees?)?(?![a-z])",
        "radian": r"(?<![a-z])rad(?:ians?)?(?![a-z])",
        "dollar": r"\\\$|\A[^$]*\$[^$]*\Z|(?<![a-z])(?:dollars?|usd)(?![a-z])",
        "cent": r"\u00a2|(?<![a-z])cents?(?![a-z])",
        "euro": r"\u20ac|(?<![a-z])(?:euros?|eur)(?![a-z])",
        "pound": r"\u00a3|\\pounds",
        "yen": r"\u00a5|(?<![a-z])yen(?![a-z])",
    }.items()
}


def has_other_unit(text: str, reference: str) -> bool:
    """Whether an answer and its reference have different signs of angles or currencies: `5 cents` for `$5`."""
    wanted = {unit for unit, pattern in _SIGNS_OF_UNITS.items() if pattern.search(reference)}
    found = {unit for unit, pattern in _SIGNS_OF_UNITS.items() if pattern.search(text)} if wanted else set()
    return bool(found) and not found & wanted


def is_stated(number: re.Match[str]) -> bool:
    """Whether a text states a number that it contains: not in `not 42`, `half of 42`, `42 squared`, `42 is wrong`.

    Args:
        number: a match of `NUMBER` in a plain text.
    """
    is_changed = _AFTER_UNSTATED.match(number.string, number.end())
    return not is_changed and is_statement(number.string, number.start())


def is_statement(text: str, position: int) -> bool:
    """Whether the words before a position state what follows: not `not`, `less than` or `half of`."""
    before = text[max(0, position - _BEFORE_CHARS) : position]
    return _BEFORE_UNSTATED.search(" ".join(before.split())) is None


def is_denied(text: str, position: int) -> bool:
    """Whether a text denies or questions what ends at a position: `(B) is wrong`, `(B)?`."""
    return _IS_DENIED.match(text, position) is not None


def plain_text(text: str, scaled: bool = False) -> str:
    """The text without LaTeX, Markdown, currency and percent signs around its numbers: `\\$1{,}250` is `1,250`.

    Args:
        text: an answer or a reference.
        scaled: whether to write words as powers of ten: `1.5 million` as `1.5e6`.
    """
    text = replaced(replaced(text, TYPOGRAPHY), _NUMBER_NOTATIONS)
    return _SCALE.sub(lambda word: POWERS[word[1].lower()], text) if scaled else text


def replaced(text: str, replacements: _Replacements) -> str:
    for pattern, replacement in replacements:
        text = pattern.sub(replacement, text)
    return text


def joined_thousands(text: str) -> str:
    return _SPACED_THOUSANDS.sub(lambda number: number[0].replace(" ", ""), text)


def without_numbers(text: str) -> str:
    """The plain text with each number replaced by `0`."""
    return NUMBER.sub("0", text)


def value_of(match: re.Match[str] | None) -> Fraction | None:
    """The value of a match of `NUMBER`; None without a match, or if the number is too big or divided by zero."""
    if match is None or len(match[0]) > MAX_NUMBER_CHARS:
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
