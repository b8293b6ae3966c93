"""Reads from a problem's text how far from the expected numbers those of an answer may be."""

from __future__ import annotations

import re

STATED_ELSEWHERE = 1e-6
"""Tolerance where a problem accepts an error without a number that can be read."""
LARGEST = 0.01
"""A larger number is a quantity of the problem, unless the sentence names an absolute or relative error."""

_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)\s|\n\n")
_PLAINER = [
    (re.compile(r"\b[A-Z]{2,}\b"), ""),  # ERROR is something to print
    (re.compile(r"[\u2010-\u2013\u2212]"), "-"),
    (re.compile(r"<sup>|\*\*"), "^"),
    (re.compile(r"\u2264|\\leq?(?:slant)?(?![a-z])|&l[te];=?|<="), "<"),
    (re.compile(r"[${}]|</sup>|\\[()]"), ""),
    (re.compile(r"\s+"), " "),
    # asked for, not accepted
    (re.compile(r"\b(?:[Mm]inim[a-z]+|[Ss]mallest|[Ll]owest)(?: [a-z]+){0,3}? errors?\b"), ""),
]
# 10^-6, and "10 - 6" where the markup was lost; 1e-6; 0.000001
_NUMBER = re.compile(
    r"(?<![0-9.])10 ?(?:\^ ?)?\(?- ?(?P<power>[0-9]{1,2})(?![0-9])"
    r"|(?<![0-9.])1(?:\.0)?e-(?P<exponent>[0-9]{1,2})(?![0-9])|(?<![0-9.])(?P<decimal>0\.0*[15])(?![0-9])"
)
_KIND = r"(?:absolute|relative)"
_NAMED_ERROR = re.compile(
    rf"\b{_KIND}(?: ?(?:/|,|or|and)+ ?(?:an? |the )?{_KIND})? (?:errors?|precision|accuracy)\b"
    rf"|\berrors? ?[(,]? ?(?:is |in )?{_KIND}\b"
)
_IS_ACCEPTED = re.compile(r"\b(?:accept|allow|ignor|tolera|permi|(?:correct|right|fine|ok|okay|exceed)\b)")
_BOUND = r"(?:\b(?:exceed|at most|within|below|up to|(?:less|more|greater|smaller|larger) than)\b|<)"
_ALLOWED = r"\b(?:allow|accept|permi|tolera)[a-z]*\b"
_NUMBER_START = r" ?(?:of )?(?:10 ?\^? ?\(?-|1(?:\.0)?e-|0\.0)"
_STATED = [
    re.compile(rf"\berrors?\b(?:(?!\bif\b).){{0,60}}?{_BOUND}"),
    re.compile(rf"{_BOUND}.{{0,60}}?\berrors?\b"),
    re.compile(rf"\bdiffers?\b.{{0,80}}?{_BOUND}|\bdifferences?\b.{{0,80}}?{_BOUND}{_NUMBER_START}"),
    re.compile(rf"{_ALLOWED}.{{0,30}}?\berrors?\b|\berrors?\b.{{0,30}}?{_ALLOWED}|\btolerance\b"),
    # |a - b| / max(1, b) < 10^-9
    re.compile(r"(?:\|[^|]{1,40}-[^|]{1,40}\||\babs ?\([^()]{1,40}-[^()]{1,40}\)).{0,60}?" + _BOUND + _NUMBER_START),
    re.compile(rf"\bwithin{_NUMBER_START}.{{0,40}}?\b(?:correct|jury|judge|expected|actual|true|official|reference)\b"),
    # the accuracy of what is given is not that of the answer
    re.compile(
        rf"^(?!.*\b(?:given|input|guaranteed)\b).*\b(?:accura(?:te|cy)|precis(?:e|ion))\b[a-z ]{{0,30}}{_NUMBER_START}"
    ),
]


def stated_tolerance(description: str) -> float | None:
    """Largest absolute or relative error that a problem's text accepts.

    Returns:
        The number of the first sentence about the accepted error that has one; `STATED_ELSEWHERE` where such a sentence
        speaks of an absolute or relative error without a number; None where no sentence speaks of it.
    """
    sentences = [_plain(part) for part in _SENTENCE_END.split(description)]
    for sentence in sentences:
        if (number := _tolerance_of(sentence)) is not None:
            return number
    named = (_NAMED_ERROR.search(sentence) and _IS_ACCEPTED.search(sentence) for sentence in sentences)
    return STATED_ELSEWHERE if any(named) else None


def _plain(sentence: str) -> str:
    for pattern, replacement in _PLAINER:
        sentence = pattern.sub(replacement, sentence)
    return sentence.lower()


def _tolerance_of(sentence: str) -> float | None:
    named = _NAMED_ERROR.search(sentence)
    if named is None and not any(pattern.search(sentence) for pattern in _STATED):
        return None
    number = _NUMBER.search(sentence, named.end() if named else 0) or _NUMBER.search(sentence)
    if number is None:
        return None
    power = number["power"] or number["exponent"]
    value = float(f"1e-{power}" if power else number["decimal"])
    return value if named or value <= LARGEST else None
