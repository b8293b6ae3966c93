"""Compares a model's answer with a reference answer, exactly (GSM8K, MATH).

The first of these tags that occurs is compared, at its last occurrence: `<answer>…</answer>`; `\\boxed{…}`; `#### …`;
`answer is …` or `answer: …`; `$…$` at the end of the text. Without a tag, the last number of the text is compared. In a
tagged answer, the part after its last `=` counts: the last number inside a tag, the first one after `####` and `answer
is`, which end with their sentence, or before a reason: `42 because 6 * 7 = 42`. A formula is compared by
`judge/formula.py`. `\\sqrt{2} \\approx 1.41` equals both, and `50%` equals 50 and 0.5. `\\boxed{1} and \\boxed{2}` is a
list. Several numbers and algebra (`3, 4`, `5 ft 8 in`, `2x`, `x > 5`) equal no number, except in prose between answer
tags. `negative 5` is -5, and `not 5`, `less than 5`, `half of 5` and `5 is wrong` state no number. A `!` is a factorial
inside a tag or a formula, and ends a sentence elsewhere. `3 million` equals 3000000, and also 3, for questions that ask
for millions. Reasoning up to `</think>` counts only if no answer follows it.

A reference that is not a number is a formula, the letter of a choice, or words. Such an answer has one of the tags, or
is a single line, or ends with a formula between math delimiters. The letter of a choice may also be the last of several
lines, if no other line is another letter, or end the text as in `Option B is correct.`

Answers may be hostile: every pattern takes time linear in the text, and numbers that are too big are not computed. Only
the standard library is imported, because small server processes use this module.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from eval_pipeline.judge.formula import RATIO, equal_formulas, is_rounded
from eval_pipeline.judge.formula_parser import PERIODIC, UNITS
from eval_pipeline.judge.number_notation import (
    ALTERNATIVE,
    NUMBER,
    PERCENT,
    PERMUTATIONS,
    POWERS,
    TEXT_COMMANDS,
    TYPOGRAPHY,
    has_other_unit,
    is_denied,
    is_stated,
    is_statement,
    joined_thousands,
    plain_text,
    replaced,
    value_of,
    without_numbers,
)

# not if a string, or code in prose, contains the tag
_REASONING_END = re.compile(r"(?:</think(?:ing)?>|\[/THINK\])(?![\"'\\]|`(?!``))")
_OPENING_TAG = re.compile(r"<answer>", re.IGNORECASE)
_CLOSING_TAG = re.compile(r"</answer>", re.IGNORECASE)
_BOXED = re.compile(r"\\f?box(?:ed)?(?:\s{0,3}(\{)|\s{1,3}(?=[^\s{])|(?=[0-9]))")
_BRACE = re.compile(r"[{}]")
_BETWEEN_BOXES = re.compile(
    r"[$ \n]{0,4}(?:,|,? ?(?:\\text\{)? ?(?:and|or) ?\}?)[$ \n]{0,4}(?:[A-Za-z](?:_[0-9])? ?= ?)?", re.IGNORECASE
)
# "#### 1. First" and "#### Step 1" are headings
_HASHES = re.compile(r"(?<!#)####(?!#|[ \t]{0,4}[0-9]+[.):][ \t]{0,4}[A-Za-z])(?=[^A-Za-z0-9\n]{0,20}[0-9\\])")
_ANSWER = (
    r"(?:(?:\b(?:answer|correct (?:option|choice))\b|\u7b54\u6848|\u9009\u9879|\u9009\u62e9)[ *_]{0,4}"
    r"(?:(?:is|was|(?:would|should|must) be)\b(?! not\b)|[:=\uff1a\u662f\u4e3a\u5e94\u9009\u3011]{1,3})"
    r"|[\u6545\u5e94\u9898\u4ee5\u6b64]\u9009(?!\u9879)|\u9009\u9879(?=[A-Z]))[ \t:\uff1a*]{0,8}\n{0,2}"
)
_ANSWER_IS = re.compile(rf"{_ANSWER}(?=[^.!?0-9\n]{{0,48}}\.?[0-9])", re.IGNORECASE)
_TEXT_TAGS = (re.compile(r"(?<!#)####(?!#)"), re.compile(_ANSWER, re.IGNORECASE))
# several formulas in a row are a list: $x = 1$ and $x = 2$
_FORMULAS = r"\$\$?[^$]+\$\$?(?:(?:, ?(?:(?:and|or) )?| (?:and|or) )\$\$?[^$]+\$\$?)*"
_MATH = re.compile(rf"\s*({_FORMULAS})")
_LAST_MATH = re.compile(rf"({_FORMULAS})[.\s]*$")
_IN_MATH = re.compile(r"\$\$?([^$]+)\$\$?")
_SENTENCE_END = (
    r"(?:[.?]|;(?! ?[0-9])|!{1,3}(?! ?=))(?:[ \t]|$)"
    rf"|[ \t](?!{ALTERNATIVE})(?:because|since|as|where|when|with|if|given|so|which|due|assuming|but)\b"
)
_STATEMENT_END = re.compile(rf"{_SENTENCE_END}|,[ \t](?!{ALTERNATIVE})", re.IGNORECASE)
_TEXT_END = re.compile(_SENTENCE_END, re.IGNORECASE)
_ASIDE = re.compile(r"\([^()=]*=[^()]*\)")
_DIGIT = re.compile(r"[0-9]")
_LAST_PERCENT = re.compile(r"[0-9] ?\\?%[^0-9]*\Z")
# 5 (x = 2), 5 when x = 2
_CONDITION = re.compile(
    r"(?:(?<=[0-9}])|(?<=[0-9][a-z])) {0,6},? {0,3}"
    r"(?:\([^()=]{0,20}=[^()=]{0,20}\)|(?:when|if|for|where|at|with) [^=]{0,20}=[^=]{0,20})\s*\Z"
)
_STATES = re.compile(
    r"[0-9\u00bc-\u00be\u2150-\u215e]|<answer>|\\boxed|\banswer(?: is\b|:)|\u7b54\u6848", re.IGNORECASE
)
"""Found in a text that may state an answer."""
_CHOICE = re.compile(r"^\(?([A-Za-z])\)?$")
_CHOICE_LINE = re.compile(r"^[ \t]*\(?([A-Za-z])\)?\.?[ \t]*$", re.MULTILINE)
_CORRECT_CHOICE = re.compile(
    r"(?:^|[.!?:\n])[ \t]{0,4}(?i:(?:therefore|thus|so|hence|then|clearly),? )?(?i:the )?(?i:option |choice |answer )?"
    r"(?:\(?([A-Z])\)? is (?:the )?(?:correct|right)(?: (?:option|choice|answer))?|(?:I (?:choose|pick|select)|"
    r"(?i:solution is)) (?i:option |choice )?\(?([A-Z])\)?)(?=[.!\s]|$)"
)
_CHOSEN = re.compile(
    r"\s*(?:(?i:option|choice) |\u9009\u9879?)?[\"'\u2018\u201c]?"
    r"(?:\(([A-Za-z])\)|([A-Z])(?=[).:\"'\u2019\u201d\u3002]|\s*(?:$|\u9009\u9879|\u662f?\u6b63\u786e)"
    r"|(?:,|,? ?[-\u2014]) [A-Za-z]?[a-z]{2}(?!.*(?<![A-Za-z])[A-Z](?![A-Za-z]))))"
)
_CHOICES = re.compile(r"(?=.{2})A?B?C?D?E?F?G?H?")
_BETWEEN_CHOICES = re.compile(r"\s*(?:[,.;\s]|\band\b)\s*")
_NOT_CHOSEN = re.compile(r"(?<!\s)\s*\((?:and )?not (?:\(?[A-Z]\)?(?:, | or |, or )?){1,9}\)")
_OTHER_CHOICE = re.compile(r"\([A-Za-z]\)|(?<![A-Za-z])[A-Z](?:[.)]|\s*$)")
_PROSE = re.compile(
    r"(?<![A-Za-z\\])(?!(?:sqrt|log|ln|sin|cos|tan)(?![a-z]))[A-Za-z]{2}"
    r"|(?<![-+*/^,(\u00d7\u00f7\u00b7])[ \t](?=[({|]|[<>\u2264\u2265](?! ?[a-z](?![A-Za-z])))"
)
# a word has a vowel; other letters are variables
_WORD = re.compile(r"(?<![A-Za-z0-9])(?=[a-z]{0,20}?[aeiouy\u0080-\uffff])[A-Za-z\u0080-\uffff]{2,}", re.IGNORECASE)
_OPERATOR = re.compile(r"[\\^_+*]")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_CONSTANT = re.compile(
    r"\+\s{0,3}(?:\\(?:text|mathrm)\s?\{ ?)?([cCkKD](?:_\{?[0-9]\}?)?|const(?:ant)?)\s?\}?\.?\s{0,9}$"
)
"""The constant of an integral."""
_PHRASES = [
    (re.compile(r"(?:there (?:is|are) )?no solutions?|(?:the )?empty set"), r"\emptyset"),
    (re.compile(r"(?:the (?:limit|value) )?does not exist|d\.?n\.?e"), "DNE"),
    (re.compile(r"(?:positive )?infinity"), r"\infty"),
    (re.compile(r"(?:all|any|the (?:set of )?)?(?: ?the)? ?(?:real numbers?|reals)"), r"\mathbb{R}"),
]
_MAX_PHRASE_CHARS = 60
_TIGHT_UNIT = re.compile(r"(?<=[0-9])(?=[A-Za-z]{2,10}\Z)")
_LETTERS = re.compile(r"\s*[A-Za-z]{2,}\s*")
_FORMULA = re.compile(
    r"\\[A-Za-z]|[\^\u221a\u00b2\u00b3]|\| ?-?0 ?\||[0)]!(?!=)|\{-?0\}|0 x 0|(?<![A-Za-z])sqrt|0 ?\u03c0"
    r"|[0)] {0,2}(?:[-+/\u00d7\u00f7\u00b7]|\*{1,2}) {0,2}[0(]|[-0]\(|-\\?[{\[]|0\) ?\(0"
)
# what a single number never contains; m and s are units here, not variables
_ALGEBRA = [
    re.compile(pattern)
    for pattern in (
        # 2x, 6/a
        r"0 {0,2}[inxyz](?![A-Za-z]| 0)|0(?:[abcefjkpqrtuvw]|[xyz]{2,3})(?![A-Za-z])"
        r"|0 ?/ ?[abceknpqrtuvwxyz](?![A-Za-z])|^[\s$({]{0,9}[b-z] 0"
        # 5ab, but 5hr
        r"|0(?! ?(?:hr|yr|ha|hp|ac|c[ct]|p[ctx]|qt|th|[AP]M|HP|[KMGT][BJNVW])(?![A-Za-z]))"
        r"(?: ?[abchnp-rt-z]{2}|[A-Z]{2})[^A-Za-z0-9]*$|0[A-Zx][0-9]|0 ?(?:log|ln|sin|cos|tan)(?![a-z])",
        # x + 5
        r"(?<![A-Za-z\\])(?:[a-z] ?[-+*/]|[A-Z] ?[+*]) ?0",
        # 5 + n, 5 + C; the words `a` and `I` may follow a dash
        r"0 {0,2}(?:[-+*/] ?[nxyzB-HJ-Z]|[-+] ?[bcefjkopqrtuvw]|[-+][AIi]|[-+] [AI]$|\+ i|- i$)(?![A-Za-z])",
        # x > 5, 5 < x, 5 mod 3
        r"0 {0,2}[<\u2264] ?[a-z](?![A-Za-z>])"
        r"|(?:[<\u2264\u2265\u2260\u00b1]|(?<!<[a-z])(?<![a-z]{2})(?<![>/])>) ?0|0 (?:R|mod) ?0",
        # 5_6, f(5
        r"_\{?[0-9]|(?<![A-Za-z])(?:[A-Za-z]|sqrt|log|ln|sin|cos)\(0",
    )
]
_SEVERAL = re.compile(
    r"[\s({\[\\]*(?:[A-Za-z] ?= ?)?0(?:(?: ?[,;] ?|:| : | {1,6}(?:(?:and|or|to) {1,4})?)(?:[A-Za-z] ?= ?)?-?0)+[^0]*"
)
# between the values of a list, but not before the thousands of `1,234`
_SEPARATOR = re.compile(
    r",(?![0-9]{3}(?![0-9]))|[;\n]|\\\\|(?<![A-Za-z])(?:or|and)(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])"
)
_IN_BRACKETS = re.compile(r"(?:[({](?:[^(){}\n]|[({][^(){}\n]{0,40}[)}]){0,40}[)}]|\|[^|\n]{0,40}\|) ?=")
# x_1 = 1, f(0) = 1, First: 1, a) 1
_LABEL = re.compile(
    r"(?<![A-Za-z0-9\\])(?:\\?[A-Za-z]{1,20}[0-9]{0,2}(?:_\{?[A-Za-z0-9]{1,9}\}?)?(?:\([^()=\n]{0,20}\))? ?[:=]"
    r"|\(?[A-Za-z]\)) ?(?=-?[$(]?\.?[0-9])"
)
_BEFORE_VALUES = re.compile(
    r"[\s({\[\\$]*(?:(?:the )?(?:(?:final|possible) |(?:it|they) (?:is|are) )?"
    r"(?:(?:answers?|values?|solutions?) (?:is|are)|possible)? ?:? ?)?"
    r"(?:(?:either|between|from|perhaps|maybe|possibly|(?:one|any) of) )?[($-]{0,3}",
    re.IGNORECASE,
)
_JOINT = re.compile(
    r" *\(?|(?: ?(?!(?:sum|add|total|amount|equal|come)s? )[A-Za-z]{1,20})?"
    r"(?:\s*(?:[,;.|]|\n)\s*(?:and|or)?|\s+(?:and/or|and|or|to|vs\.?|out of|r|remainder))"
    r"(?:\s*(?:maybe|perhaps|possibly|alternatively|either))?[ ,]*(?:- )?[($-]{0,3}",
    re.IGNORECASE,
)
_MAX_JOINT_CHARS = 50
_DECODED_ESCAPE = re.compile(r"[\x07\x08\x0b\x0c\r][a-z]|\t(?:ext|imes|frac|an\b|heta)|\n(?:eq|u\b)")
# of statements without an end: `3 or 4`, `3 to 4`, `3:4`, and `3, 4` if nothing follows
_ENUMERATION = (
    r"[^0]*0(?:[,;]? {1,4}(?:\(?(?:(?:and/or|and|or|maybe|perhaps) {1,4}){1,2})?-?0|, ?[A-Za-z] ?= ?-?0)+[^\w]*"
)
_ALTERNATIVES = re.compile(
    rf"{_ENUMERATION}|[^0]*0(?:,? {{1,4}}(?:or|to) {{1,4}}|:)-?0(?! ?(?:decimal|significant|places|d\.?p|s\.?f)).*"
)
_ONLY_NUMBERS = re.compile(_ENUMERATION)
_MODULUS = re.compile(r"\s{0,3}(?:\\pmod\s?\{?([0-9]{1,9})\}?|\((?:\\bmod|\\mod|mod)\s([0-9]{1,9})\))")
_WITH_BASE = re.compile(r"\s*\(?([0-9][0-9A-Z]{0,99})\)?_\{?(?:\\text\{)?\(?([0-9]{1,3})\)?\}{0,2}\s*")
_TIME = re.compile(r"([0-9]{1,2})(?:\{?:\}?([0-9]{2}))?(?:\s{0,3}([ap])\.?\s?m\.?)?", re.IGNORECASE)
_ROUNDED = re.compile(r"-?[0-9]{0,300}(?:\.[0-9]{1,300})?")
LAST_CHOICE = "J"
"""Last letter of a choice that may be written in either case."""
NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
MAX_LINE_CHARS = 400
"""Longest result of an answer without a box or answer tags."""


@dataclass(frozen=True)
class _Tagged:
    """The part of an answer that states the result."""

    text: str
    enclosed: bool
    """Whether the tag has an end, so that it contains nothing but the result."""
    is_math: bool = False
    """Whether it is a formula, as in a box, without prose around its value."""


def after_reasoning(text: str) -> str | None:
    """The text after the last `</think>`; None if there is none."""
    end = _last(_REASONING_END, text)
    return text[end.end() :] if end else None


def is_right(answer: str, reference: str) -> bool:
    """Whether an answer has the reference's value; the module's docstring says which part of it counts.

    Args:
        answer: the model's whole text.
        reference: a number in the dataset's notation, a formula, the letter of a choice, or words.
    """
    if not reference.strip():
        return False
    text, reference = _comparable(answer, reference)
    if _is_right(text, reference, scaled=False):
        return True
    return any(word in text.lower() for word in POWERS) and _is_right(text, reference, scaled=True)


def stated_result(answer: str, reference: str) -> str | None:
    """The part of an answer that `is_right` compares with the reference; None if no part of it states a result."""
    text, reference = _comparable(answer, reference)
    if parse_number(reference) is None:
        result = _stated_text(text, reference)
    elif tagged := _find_tagged(text):
        result = _result(tagged.text, tagged.enclosed)
    else:
        number = _last(NUMBER, joined_thousands(plain_text(text)))
        result = number[0] if number else None
    return None if result is None else result.strip() or None


def parse_number(reference: str) -> Fraction | None:
    """The exact value of a reference answer; None if it is not a number."""
    text = joined_thousands(plain_text(reference).strip())
    return None if without_numbers(text).strip(".") != "0" else value_of(NUMBER.search(text))


def has_decoded_escape(reference: str) -> bool:
    """Whether a JSON file had `\\frac` with a single backslash, which JSON decodes as a control character and `rac`."""
    return _DECODED_ESCAPE.search(reference) is not None


def _without_reasoning(answer: str) -> str:
    final = after_reasoning(answer)
    return replaced(answer if final is None or not _STATES.search(final) else final, TYPOGRAPHY)


def _comparable(answer: str, reference: str) -> tuple[str, str]:
    """The answer without its reasoning, and the reference, in one notation.

    A modulus is left out, as in `7 \\pmod{12}`, unless both have one and they differ.
    """
    text, reference = _without_reasoning(answer), replaced(reference, TYPOGRAPHY)
    modulus = _MODULUS.search(reference)
    wanted = modulus and (modulus[1] or modulus[2])
    text = _MODULUS.sub(lambda found: "" if wanted in (None, found[1] or found[2]) else found[0], text)
    return text, _MODULUS.sub("", reference)


def _is_right(text: str, reference: str, scaled: bool) -> bool:
    wanted = parse_number(reference)
    if wanted is None:
        return not scaled and _is_text_or_formula(text, reference)
    text = replaced(text, PERMUTATIONS)
    tagged = _find_tagged(text)
    if (tagged is None or not _DIGIT.search(tagged.text)) and (word := _number_word(text)) is not None:
        return word == wanted
    if tagged is None:
        number = _last(NUMBER, joined_thousands(plain_text(text, scaled)))
        if number is None or not is_stated(number):
            return False
        return _equals(value_of(number), wanted, _LAST_PERCENT.search(text) is not None, reference)
    if has_other_unit(tagged.text, reference):
        return False
    stated = joined_thousands(plain_text(tagged.text, scaled))
    candidate = _result(stated, tagged.enclosed)
    is_ratio = tagged.enclosed and RATIO.search(candidate.strip()) is not None
    if tagged.enclosed and not is_ratio and (_has_several_values if tagged.is_math else _enumerates_values)(stated):
        return False
    if any(equal_formulas(exact, reference) for exact in _before_rounding(tagged.text, tagged.enclosed)):
        return True
    if PERIODIC.search(candidate) or _FORMULA.search(without_numbers(candidate)):
        return equal_formulas(_result(tagged.text, tagged.enclosed), reference)
    if is_ratio:
        return equal_formulas(candidate, reference)
    if _is_no_number(stated, candidate, tagged.enclosed):
        return False
    number = _last(NUMBER, candidate) if tagged.enclosed else NUMBER.search(candidate)
    value = value_of(number) if number and is_stated(number) else None
    return _equals(value, wanted, PERCENT.search(tagged.text) is not None, reference)


def _equals(value: Fraction | None, wanted: Fraction, is_percentage: bool, reference: str) -> bool:
    """Whether a number, which may be a percentage, has the reference's value: `50%` equals 50 and 0.5."""
    if is_percentage == (PERCENT.search(reference) is not None):
        return value == wanted
    return value in (wanted, wanted * (100 if is_percentage else Fraction(1, 100)))


def _number_word(text: str) -> int | None:
    """The number of an answer that is a word: `\\boxed{seven}`, `The answer is seven.`"""
    words = replaced(_stated_text(text, "") or "", TEXT_COMMANDS).strip(" .").casefold()
    return NUMBER_WORDS.index(words) if words in NUMBER_WORDS else None


def _is_text_or_formula(text: str, reference: str) -> bool:
    """Whether an answer states a reference that is not a number: a formula, a choice such as `(B)`, or words."""
    stated, reference = _stated_text(text, reference), _as_sign(reference)
    stated = stated and _as_sign(stated)
    if stated is None or has_other_unit(stated, reference):
        return False
    if choice := _CHOICE.match(replaced(reference, TEXT_COMMANDS).strip()):
        stated_choice = _NOT_CHOSEN.sub("", replaced(stated, TEXT_COMMANDS)).strip()
        if chosen := _CHOSEN.match(stated_choice) or _CHOICE.match(stated_choice.rstrip(".")):
            is_only_one = _OTHER_CHOICE.search(chosen.string, chosen.end()) is None
            is_stated_choice = is_only_one and not is_denied(chosen.string, chosen.end())
            return is_stated_choice and _same_choice(chosen[chosen.lastindex or 0], choice[1])
    if _same_text(stated, reference) or _same_time(stated, reference):
        return True
    if digits := _WITH_BASE.fullmatch(reference):
        bare = "".join(replaced(stated, TEXT_COMMANDS).split()).upper()
        found = _WITH_BASE.fullmatch(bare)
        if bare == digits[1] or (found and found.groups() == digits.groups()):
            return True
    if _CHOICES.fullmatch(reference) and _BETWEEN_CHOICES.sub("", replaced(stated, TEXT_COMMANDS)) == reference:
        return True
    if "\\text" in reference:
        stated = _TIGHT_UNIT.sub(" ", stated)
    if "B" not in reference:
        stated = _with_constant_of(reference, stated)
    if _LETTERS.fullmatch(reference) and _LETTERS.fullmatch(stated):
        return False
    candidates = [stated, *_before_rounding(stated, enclosed=True)]
    return any(equal_formulas(joined_thousands(each), joined_thousands(reference)) for each in candidates)


def _stated_text(text: str, reference: str) -> str | None:
    """The part of an answer that states a formula, a choice or words.

    Returns:
        None if the answer has no tag and several lines, unless they end with a formula between math delimiters, or the
        last line and the reference are choices.
    """
    if (enclosed := _enclosed(text)) is not None:
        return enclosed
    tag = next(filter(None, (_last(pattern, text) for pattern in _TEXT_TAGS)), None)
    line = text[tag.end() :].partition("\n")[0] if tag else text.strip()
    is_choice = _CHOICE.match(replaced(reference, TEXT_COMMANDS).strip())
    if is_choice and tag is None and (letter := _correct_choice(line)):
        return letter
    if is_choice and "\n" in line:
        return _last_choice(replaced(line, TEXT_COMMANDS).strip())
    if tag is None and (math := _last_math(line)):
        return math
    return None if len(line) > MAX_LINE_CHARS or "\n" in line else _math_or_sentence(line)


def _last_choice(text: str) -> str | None:
    """The last line if it is a choice; None if it is not, or another line is another choice."""
    lines = [*_CHOICE_LINE.finditer(text)]
    if not lines or lines[-1].end() < len(text) or len({line[1].casefold() for line in lines}) > 1:
        return None
    return lines[-1][0]


def _last_math(text: str) -> str | None:
    """The formulas with which a text ends; None if it negates or bounds them, as in `not $5$`."""
    end = text[-MAX_LINE_CHARS:]
    math = _LAST_MATH.search(end)
    return ", ".join(_IN_MATH.findall(math[1])) if math and is_statement(end, math.start()) else None


def _correct_choice(text: str) -> str | None:
    """`B` of a text that ends with `Option B is correct.`; None if it says this of another choice too."""
    found = [*_CORRECT_CHOICE.finditer(text)]
    is_last = bool(found) and not text[found[-1].end() :].strip(".! ")
    letters = {each[1] or each[2] for each in found}
    return letters.pop() if is_last and len(letters) == 1 else None


def _math_or_sentence(text: str) -> str:
    """The formulas with which a statement starts, or its first sentence: `x + y` of `$x + y$. I hope it is right.`"""
    if math := _MATH.match(text):
        return ", ".join(_IN_MATH.findall(math[1]))
    return _up_to(text, _TEXT_END.search(text)).rstrip(" ,")


def _result(stated: str, enclosed: bool) -> str:
    """The part of a statement that is its value: `42` of `6 * 7 = 42 apples`."""
    return _after_equals(_CONDITION.sub("", stated)) if enclosed else _before_prose(_after_equals(stated))


def _before_rounding(stated: str, enclosed: bool) -> list[str]:
    """The values before the result, if it is these values rounded: `\\sqrt{2}` of `x = \\sqrt{2} = 1.41`."""
    *exact, last = stated.rsplit("=", 3)
    result = _ROUNDED.fullmatch(plain_text(last if enclosed else _before_prose(last)).strip())
    return [each for each in exact if is_rounded(each, result[0])] if result else []


def _has_several_values(formula: str) -> bool:
    """Whether a formula contains different numbers, and not `6 * 7 = 42`: `2 hours 30 minutes`, `x_1 = 1, x_2 = 2`."""
    values: set[Fraction | str | None] = set()
    for part in _SEPARATOR.split(_IN_BRACKETS.sub("=", formula)):
        result = _after_equals(part)
        if _FORMULA.search(without_numbers(result)):
            values.add(result.strip())
        else:
            values.update(map(value_of, NUMBER.finditer(result)))
    return len(values) > 1


def _enumerates_values(text: str) -> bool:
    """Whether a text is nothing but different numbers, with names, units or nouns: `17 apples and 18 oranges`."""
    text = _LABEL.sub("", text)
    numbers = [*NUMBER.finditer(text)]
    if len({*map(value_of, numbers)}) < 2 or not _BEFORE_VALUES.fullmatch(text, 0, numbers[0].start()):
        return False
    return all(_is_joint(text[one.end() : other.start()]) for one, other in pairwise(numbers))


def _is_joint(text: str) -> bool:
    is_short = len(text) <= _MAX_JOINT_CHARS
    return is_short and (text.strip(" .").casefold() in UNITS or _JOINT.fullmatch(text) is not None)


def _is_no_number(stated: str, candidate: str, enclosed: bool) -> bool:
    """Whether a statement is algebra, or consists of several numbers; without an end, it may be `42, 6 a day`."""
    if any(pattern.search(without_numbers(candidate)) for pattern in _ALGEBRA):
        return True
    pattern = _SEVERAL if enclosed else _ALTERNATIVES
    is_several = pattern.fullmatch(without_numbers(stated))
    return bool(is_several) and len({*map(value_of, NUMBER.finditer(stated))}) > 1


def _enclosed(text: str) -> str | None:
    """The content of `<answer>…</answer>` or `\\boxed{…}`; None without these tags."""
    answer = _in_answer_tags(text)
    boxes = joined_boxes(text if answer is None else answer)
    return answer if boxes is None else boxes


def _find_tagged(text: str) -> _Tagged | None:
    if (inner := _enclosed(text)) is not None:
        return _Tagged(inner, enclosed=True, is_math=inner != _in_answer_tags(text))
    for pattern in (_HASHES, _ANSWER_IS):
        if found := _last(pattern, text):
            line = text[found.end() :].partition("\n")[0]
            math = _MATH.match(line)
            formulas = _IN_MATH.findall(math[1]) if math else []
            if len(formulas) > 1:
                return _Tagged(", ".join(formulas), enclosed=True, is_math=True)
            return _Tagged(_statement(line), enclosed=False)
    last_math = _last_math(text)
    if last_math and "\n" not in last_math.strip() and _DIGIT.search(last_math):
        return _Tagged(last_math, enclosed=True)
    return None


def _in_answer_tags(text: str) -> str | None:
    opening = _last(_OPENING_TAG, text)
    if opening is None:
        return None
    closing = _CLOSING_TAG.search(text, opening.end())
    # a tag left open was cut off by a stop string or the token limit
    return text[opening.end() : closing.start() if closing else None]


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}` or `\\boxed 5`, up to the end if it is cut off; None without one."""
    boxes = _last_boxes(text)
    return boxes[-1] if boxes else None


def joined_boxes(text: str) -> str | None:
    """The contents of the last box and of those that a comma, `and` or `or` joins to it, as a list."""
    return ", ".join(_last_boxes(text)) or None


def _last_boxes(text: str) -> list[str]:
    """The contents of the last box, and of those before it that a comma, `and` or `or` joins to it."""
    contents: list[str] = []
    start = len(text)
    openings = [*_BOXED.finditer(text)]
    if len(openings) > 1 and _repeats_cut_off(text, *openings[-2:]):
        start = openings.pop().start()
    for opening in reversed(openings):
        content, end = _box_content(text, opening, start)
        if contents and not _BETWEEN_BOXES.fullmatch(text, end, start):
            break
        contents.append(content)
        start = opening.start()
    return contents[::-1]


def _repeats_cut_off(text: str, previous: re.Match[str], last: re.Match[str]) -> bool:
    """Whether the last box is cut off, and begins like the box before it: the answer repeats itself up to its limit."""
    content, end = _box_content(text, last, len(text))
    complete, complete_end = _box_content(text, previous, last.start())
    is_cut_off = last[1] is not None and last.end() + len(content) == end
    return is_cut_off and complete_end < last.start() and complete.startswith(content.strip())


def _box_content(text: str, opening: re.Match[str], limit: int) -> tuple[str, int]:
    """The content of a box that ends before `limit`, and the position behind the box."""
    if opening[1] is None:
        content = text[opening.end() : limit].partition(" ")[0].partition("\n")[0].partition("$")[0]
        return content, opening.end() + len(content)
    depth = 1
    for brace in _BRACE.finditer(text, opening.end(), limit):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[opening.end() : brace.start()], brace.end()
    return text[opening.end() : limit], limit


def _statement(text: str) -> str:
    """The stated result, without the rest of the line: `40 of 50 = 20. Check: 2 * 20 = 40`."""
    number = _DIGIT.search(text)
    sentence_end = _TEXT_END.search(text, number.end()) if number else None
    sentence = _up_to(text, sentence_end)
    if _ONLY_NUMBERS.fullmatch(without_numbers(plain_text(sentence))):
        return sentence
    end = _STATEMENT_END.search(text, number.end()) if number else None
    return _ASIDE.sub(" ", _up_to(text, end))


def _up_to(text: str, end: re.Match[str] | None) -> str:
    """The text before the end of a statement, with a question mark, which denies the statement."""
    return text if end is None else text[: end.start() + end[0].startswith("?")]


def _before_prose(text: str) -> str:
    """The text before the first word after a number: `6 * 7 = 42` of `6 * 7 = 42 because 3 of them …`."""
    number = NUMBER.search(text)
    word = _PROSE.search(text, number.end()) if number and is_stated(number) else None
    return text[: word.start()] if word else text


def _after_equals(text: str) -> str:
    head, _, tail = text.rpartition("=")
    return tail if any(char.isdigit() for char in tail) else head or tail


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def _same_text(candidate: str, reference: str) -> bool:
    """Whether a part of an answer is the reference, ignoring whitespace around signs and the case of words."""
    texts = (" ".join(replaced(text, TEXT_COMMANDS).split()) for text in (candidate, reference))
    candidate, reference = (re.sub(r"(?<!\w) | (?!\w)", "", text).rstrip(".") for text in texts)
    return _with_small_words(candidate) == _with_small_words(reference)


def _with_small_words(text: str) -> str:
    """The text with its words in lower case, unless it is a formula, in which `m` and `M` differ."""
    return text if _OPERATOR.search(text) else _WORD.sub(lambda word: word[0].casefold(), text)


def _as_sign(text: str) -> str:
    """The sign of words such as `no solution`, `does not exist` or `infinity`; another text as it is."""
    if len(text) > _MAX_PHRASE_CHARS:
        return text
    words = " ".join(replaced(text, TEXT_COMMANDS).split()).rstrip(".").casefold()
    return next((sign for pattern, sign in _PHRASES if pattern.fullmatch(words)), text)


def _same_choice(letter: str, reference: str) -> bool:
    """Whether two letters are the same choice; later letters of the alphabet are variables, in either case."""
    return letter == reference or (letter.upper() == reference.upper() and letter.upper() <= LAST_CHOICE)


def _with_constant_of(reference: str, text: str) -> str:
    """`x^2 + C` of `x^2 + k` for a reference with `+ C`, unless a formula contains the letter elsewhere.

    Other letters than C may be variables, and equal only themselves in either case.
    """
    wanted, found = _CONSTANT.search(reference), _CONSTANT.search(text)
    if wanted is None or found is None:
        return text
    is_elsewhere = any(each[1][0] in _COMMAND.sub("", each.string[: each.start()]) for each in (wanted, found))
    is_constant = wanted[1][0] == "C" or wanted[1].startswith("const")
    if is_elsewhere or not (is_constant or wanted[1].casefold() == found[1].casefold()):
        return text
    return f"{text[: found.start()]}{wanted[0]}"


def _same_time(candidate: str, reference: str) -> bool:
    """Whether both are the same time of day; `a.m.` and `p.m.` may be missing on one side."""
    times = [_TIME.fullmatch(" ".join(replaced(text, TEXT_COMMANDS).split())) for text in (candidate, reference)]
    one, other = (time and (int(time[1]), int(time[2] or 0), (time[3] or "").casefold()) for time in times)
    if one is None or other is None or not (one[2] or other[2]):
        return False
    return one[:2] == other[:2] and (one[2] == other[2] or not (one[2] and other[2]))
