"""Compares a model's answer with a reference answer (GSM8K).

Of these the first that occurs is compared, each in its last occurrence: `<answer>…</answer>`; `\\boxed{…}`; `#### …`;
`answer is …` or `answer: …`; else the last number of the text. Of a tagged answer what follows its last `=` counts,
and of that the last number inside `<answer>` and `\\boxed`, the first after `####` and `answer is`. Those two end with
their sentence, or before a reason: `42 because 6 * 7 = 42`. A tagged answer that is a formula is left to `math_verify`,
and is wrong where that is not installed. `3 million` is 3000000, and also 3, for questions that ask for millions.

Only the standard library is imported here, since small server processes use it. Time is linear in the answer's length.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from fractions import Fraction

from eval_pipeline.problems.numbers import first_number, last_number, plain_text, scaled_text, without_numbers

MAX_FORMULA_CHARS = 100

_OPENING_TAG = re.compile(r"<answer>", re.IGNORECASE)
_CLOSING_TAG = re.compile(r"</answer>", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s{0,3}\{")
_BRACE = re.compile(r"[{}]")
# "#### 1. First" and "#### Step 1" are headings
_HASHES = re.compile(r"(?<!#)####(?!#|[ \t]{0,4}[0-9]+[.):][ \t]{0,4}[A-Za-z])([^A-Za-z0-9\n]{0,20}[0-9\\][^\n]*)")
_ANSWER_IS = re.compile(
    r"\banswer\b[ *_]{0,4}(?:is|was|would be|:|=)[ \t:*]{0,8}\n{0,2}([^.!?0-9\n]{0,48}\.?[0-9][^\n]*)", re.IGNORECASE
)
_STATEMENT_END = re.compile(
    r"[.!?;](?:[ \t]|$)|,[ \t]|[ \t](?:because|since|as|where|when|with|if|given|so|which|due|assuming|but)\b",
    re.IGNORECASE,
)
_ASIDE = re.compile(r"\([^()=]*=[^()]*\)")
_DIGIT = re.compile(r"[0-9]")
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2}")
_FORMULA = re.compile(r"\\[A-Za-z]|[\^\u221a]|[0)] ?[-+*/\u00d7\u00f7] ?[0(]|0\(")
# bounded arithmetic alone: `math_verify` would set out to compute 9^(9^9), and cannot be interrupted in a thread
_HARMLESS_FORMULA = re.compile(
    r"(?:[-0-9 .,()+*/{}\u00d7\u00f7]|\\(?:[dt]?frac|times|cdot|div|sqrt|left|right)(?![a-z])"
    r"|\^\{?[0-9]{1,2}(?![0-9]))*"
)


@dataclass(frozen=True)
class _Tagged:
    """The part of an answer that says what the answer is."""

    text: str
    enclosed: bool
    """Whether the tag has an end, so that nothing but the answer is in it."""


def is_right(answer: str, reference: str) -> bool:
    """Whether an answer gives the reference's value; the module's description says which part of it counts.

    Args:
        answer: the model's whole text; it may be hostile.
        reference: a number as the data set writes it, or a formula for `math_verify`.
    """
    text = plain_text(answer)
    scaled = scaled_text(text)
    return _is_right(text, reference) or (scaled != text and _is_right(scaled, reference))


def number_of(reference: str) -> Fraction | None:
    """The exact value of a reference answer; None where it is no number."""
    text = plain_text(reference).strip()
    return None if without_numbers(text).strip(".") != "0" else first_number(text)


def _is_right(text: str, reference: str) -> bool:
    wanted = number_of(reference)
    tagged = _find_tagged(text)
    if tagged is None:
        return wanted is not None and last_number(text) == wanted
    candidate = _behind_equals(tagged.text)
    candidate = candidate if tagged.enclosed else _before_prose(candidate)
    if wanted is None or _FORMULA.search(without_numbers(candidate)):
        return _same_formula(candidate, reference)
    return (last_number if tagged.enclosed else first_number)(candidate) == wanted


def _find_tagged(text: str) -> _Tagged | None:
    enclosed = _in_answer_tags(text)
    boxed = _boxed(text if enclosed is None else enclosed)
    if (inner := enclosed if boxed is None else boxed) is not None:
        return _Tagged(inner, enclosed=True)
    for pattern in (_HASHES, _ANSWER_IS):
        if found := _last(pattern, text):
            return _Tagged(_statement(found[1]), enclosed=False)
    return None


def _in_answer_tags(text: str) -> str | None:
    opening = _last(_OPENING_TAG, text)
    if opening is None:
        return None
    closing = _CLOSING_TAG.search(text, opening.end())
    # a tag left open was cut off by a stop string or the token limit
    return text[opening.end() : closing.start() if closing else None]


def _boxed(text: str) -> str | None:
    opening = _last(_BOXED, text)
    if opening is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, opening.end()):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[opening.end() : brace.start()]
    return text[opening.end() :]


def _statement(text: str) -> str:
    """What is said to be the answer, without the rest of the line: `40 of 50 = 20. Check: 2 * 20 = 40`."""
    number = _DIGIT.search(text)
    end = _STATEMENT_END.search(text, number.end()) if number else None
    return _ASIDE.sub(" ", text[: end.start()] if end else text)


def _before_prose(text: str) -> str:
    """`6 * 7 = 42 because 3 of them …` up to the first word behind a number."""
    number = _DIGIT.search(text)
    word = _WORD.search(text, number.end()) if number else None
    return text[: word.start()] if word else text


def _behind_equals(text: str) -> str:
    head, _, tail = text.rpartition("=")
    return tail if any(char.isdigit() for char in tail) else head or tail


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for match in pattern.finditer(text):
        last = match
    return last


def _same_formula(candidate: str, reference: str) -> bool:
    """`math_verify`'s opinion; where it has none to give, whether the two are the same text."""
    candidate, reference = candidate.strip().rstrip("."), plain_text(reference).strip()
    if candidate.casefold() == reference.casefold():
        return True
    if not (_is_harmless(candidate) and _is_harmless(reference)):
        return False
    try:
        from math_verify import parse, verify
    except ImportError:
        return False
    # its time limits are signals, for main threads only; formulas this small need none
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold, given = (parse(f"${formula}$", parsing_timeout=None) for formula in (reference, candidate))
    return verify(gold, given, timeout_seconds=None)


def _is_harmless(formula: str) -> bool:
    short = len(formula) <= MAX_FORMULA_CHARS and formula.count("^") <= 1 and "**" not in formula
    return short and _HARMLESS_FORMULA.fullmatch(formula) is not None
