"""CodeContests' format (Li et al. 2022, arXiv 2203.07814), and simpler rows of the same kind.

`name`, `description`, and tests in `public_tests`, `private_tests`, `generated_tests` or `tests`, each
`{input: [...], output: [...]}` or a list of `{input, output}`; or lists `input` and `output` in the row itself. All
tests are used, each input once. `time_limit` is ignored: every problem has the limits of the protocol.
"""

from __future__ import annotations

import re
from typing import Any

from eval_pipeline.judge import ProgramCase, ProgramTests
from eval_pipeline.problems.problem import Problem
from eval_pipeline.problems.record import Record

_TEST_KEYS = ("public_tests", "private_tests", "generated_tests", "tests")
_PYTHON3 = (3, "PYTHON3")
"""Python 3 in `solutions.language`: a number in the published data, a name in exports."""
_INSTRUCTION = """{description}

Write a Python 3 program that solves this problem. It reads the input from standard input and prints the output, and \
nothing else, to standard output. Reply with the whole program in one ```python code block."""


def parse_problem(record: Record) -> Problem:
    """The problem of one row.

    Raises:
        UserError: a key is missing or has the wrong type, there is no test, or inputs and outputs differ in number.
    """
    description = record.text("description", "prompt", "question")
    return Problem(
        problem_id=record.identifier("name", "problem_id", "task_id", "id"),
        prompt=_INSTRUCTION.format(description=description.strip()),
        tests=ProgramTests(_cases(record), stated_tolerance(description)),
        canonical_solution=_canonical_solution(record),
    )


def _cases(record: Record) -> tuple[ProgramCase, ...]:
    cases: dict[str, ProgramCase] = {}
    for key in _TEST_KEYS:
        for case in _cases_of(record.fields.get(key), key, record):
            cases.setdefault(case.stdin, case)
    plain = {"input": record.fields.get("input"), "output": record.fields.get("output")}
    if plain != {"input": None, "output": None}:
        for case in _cases_of(plain, "the row", record):
            cases.setdefault(case.stdin, case)
    if not cases:
        raise record.error(f"{', '.join(_TEST_KEYS)}, 'input' and 'output' hold no test; add one")
    return tuple(cases.values())


def _cases_of(tests: Any, key: str, record: Record) -> list[ProgramCase]:
    """The cases of one group of tests, in either of its two forms."""
    if tests is None:
        return []
    if isinstance(tests, dict):
        inputs, outputs = tests.get("input"), tests.get("output")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise record.error(f"'input' and 'output' of {key} must be two lists of the same length")
        pairs = list(zip(inputs, outputs))
    elif isinstance(tests, list) and all(isinstance(test, dict) for test in tests):
        pairs = [(test.get("input"), test.get("output")) for test in tests]
    else:
        raise record.error(f"{key!r} must be an object of 'input' and 'output' lists, or a list of such pairs")
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise record.error(f"every 'input' and 'output' of {key} must be a string")
    return [ProgramCase(stdin, expected) for stdin, expected in pairs]


def _canonical_solution(record: Record) -> str | None:
    """The first published solution in Python 3."""
    solutions = record.fields.get("solutions")
    if solutions is None:
        return record.optional_text("canonical_solution")
    if not isinstance(solutions, dict) or not all(isinstance(solutions.get(k), list) for k in ("language", "solution")):
        raise record.error("'solutions' must be an object of 'language' and 'solution' lists")
    pairs = zip(solutions["language"], solutions["solution"])
    return next((solution for language, solution in pairs if language in _PYTHON3), None)


# The error that the text of a problem accepts

_UNSTATED_TOLERANCE = 1e-6
"""Used if a problem accepts an error without a readable number."""
_LARGEST_TOLERANCE = 0.01
"""A larger number is a quantity in the problem, unless the sentence names an absolute or relative error."""

_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)\s|\n\n")
_TEXT_PLAINER = [
    (re.compile(r"\b[A-Z]{2,}\b"), ""),  # ERROR is a word to print
    (re.compile(r"[\u2010-\u2013\u2212]"), "-"),
    (re.compile(r"<sup>|\*\*"), "^"),
    (re.compile(r"\u2264|\\leq?(?:slant)?(?![a-z])|&l[te];=?|<="), "<"),
    (re.compile(r"[${}]|</sup>|\\[()]"), ""),
    (re.compile(r"\s+"), " "),
    # an error to compute, not to accept
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
_BOUND_START = r" ?(?:of )?(?:10 ?\^? ?\(?-|1(?:\.0)?e-|0\.0)"
_STATED = [
    re.compile(rf"\berrors?\b(?:(?!\bif\b).){{0,60}}?{_BOUND}"),
    re.compile(rf"{_BOUND}.{{0,60}}?\berrors?\b"),
    re.compile(rf"\bdiffers?\b.{{0,80}}?{_BOUND}|\bdifferences?\b.{{0,80}}?{_BOUND}{_BOUND_START}"),
    re.compile(rf"{_ALLOWED}.{{0,30}}?\berrors?\b|\berrors?\b.{{0,30}}?{_ALLOWED}|\btolerance\b"),
    # |a - b| / max(1, b) < 10^-9
    re.compile(r"(?:\|[^|]{1,40}-[^|]{1,40}\||\babs ?\([^()]{1,40}-[^()]{1,40}\)).{0,60}?" + _BOUND + _BOUND_START),
    re.compile(rf"\bwithin{_BOUND_START}.{{0,40}}?\b(?:correct|jury|judge|expected|actual|true|official|reference)\b"),
    # the accuracy of given numbers is not that of the answer
    re.compile(
        rf"^(?!.*\b(?:given|input|guaranteed)\b).*\b(?:accura(?:te|cy)|precis(?:e|ion))\b[a-z ]{{0,30}}{_BOUND_START}"
    ),
]


def stated_tolerance(description: str) -> float | None:
    """The largest absolute or relative error that the text of a problem accepts.

    Returns:
        The number in the first sentence about the accepted error that has one; `_UNSTATED_TOLERANCE` if a sentence
        names an absolute or relative error without a number; None if there is no such sentence.
    """
    sentences = [_plain(part) for part in _SENTENCE_END.split(description)]
    for sentence in sentences:
        if (number := _tolerance_of(sentence)) is not None:
            return number
    named = (_NAMED_ERROR.search(sentence) and _IS_ACCEPTED.search(sentence) for sentence in sentences)
    return _UNSTATED_TOLERANCE if any(named) else None


def _plain(sentence: str) -> str:
    for pattern, replacement in _TEXT_PLAINER:
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
    return value if named or value <= _LARGEST_TOLERANCE else None
