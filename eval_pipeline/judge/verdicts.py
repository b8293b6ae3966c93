"""Computes verdicts from reports of runs. Nothing that an answer claims about itself counts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

from eval_pipeline.judge.types import ErrorType, FunctionOutcome, ProgramCase, ResourceLimits, RunReport, Verdict

MESSAGE_CHARS = 500
_BY_SEVERITY: tuple[ErrorType, ...] = ("syntax_error", "timeout", "runtime_error", "wrong_answer", "success")
_SHOWN_CHARS = 120
_IDLE_SHARE = 0.8
_SCANNED_CHARS = 1 << 17
_MB = 1 << 20


@dataclass(frozen=True)
class TestResult:
    """One test of an answer."""

    error_type: ErrorType
    message: str
    wall_s: float
    is_doubtful: bool = False
    """Whether the machine may be the cause, so that another run decides: the answer hit the wall-clock limit, but did
    not sleep for most of the time, or the test's process was killed."""


NO_PROGRAM = TestResult("syntax_error", "no program in the answer", 0.0)
"""The result of an empty program, which would run without an error and must not count as code that ran."""


def combine_results(results: Sequence[TestResult], num_tests: int) -> Verdict:
    """The verdict from the tests that were run, in order; tests that were not run are not passed.

    Args:
        results: empty only if the problem has no tests, which is not the answer's fault.
        num_tests: number of the problem's tests.
    """
    if not results:
        return Verdict("api_error", 0, num_tests, "the problem has no tests")
    worst = min((result.error_type for result in results), key=_BY_SEVERITY.index)
    number, first = next((n, result) for n, result in enumerate(results, 1) if result.error_type == worst)
    num_passed = sum(result.error_type == "success" for result in results)
    wall_s = sum(result.wall_s for result in results)
    message = "" if worst == "success" else _numbered(number, first)
    return Verdict(worst, num_passed, num_tests, message[:MESSAGE_CHARS], wall_s)


def _numbered(number: int, result: TestResult) -> str:
    return result.message if result.error_type == "syntax_error" else f"test {number}: {result.message}"


def judge_function_run(report: RunReport, outcome: FunctionOutcome, limits: ResourceLimits) -> TestResult:
    """Judge one test of a function from the answer's run and the test's outcome."""
    # a test that waits for a processor, and not for the answer, keeps the answer waiting
    if (stopped := _stopped(report, limits, min(report.idle_s, outcome.waited_s))) is not None:
        return stopped
    wall_s = report.wall_s
    match outcome.kind:
        case "passed":
            return TestResult("success", "", wall_s)
        case "failed":
            return TestResult("wrong_answer", outcome.message, wall_s)
        case "error":
            return TestResult("runtime_error", outcome.message, wall_s)
        case "died" if wall_s >= min(limits.cpu_s, limits.test_cpu_s):
            return TestResult("timeout", outcome.message, wall_s)
    message = outcome.message if report.end == "ended" else _ending(report)
    return TestResult("runtime_error", message, wall_s, is_doubtful=outcome.kind == "died")


def judge_program_run(
    report: RunReport, case: ProgramCase, match: Callable[[str, str], bool], limits: ResourceLimits
) -> TestResult:
    """Judge one run of a program by its output; `match` says whether it equals the expected output."""
    if (stopped := _stopped(report, limits, report.idle_s)) is not None:
        return stopped
    if report.exit_code != 0:
        return TestResult("runtime_error", _ending(report), report.wall_s)
    actual = report.stdout.decode(errors="replace")
    if match(actual, case.expected):
        return TestResult("success", "", report.wall_s)
    message = _difference(actual, case.expected, match)
    if len(report.stdout) >= int(limits.output_mb * _MB):
        message = f"the output was cut off at the judge's limit of {limits.output_mb:g} MiB; {message}"
    return TestResult("wrong_answer", message, report.wall_s)


def may_be_starved(idle_s: float, limits: ResourceLimits) -> bool:
    """Whether a run that hit the wall-clock limit might have ended in time on an idle machine.

    Args:
        idle_s: how long the run waited for nothing that the machine does.
        limits: the limits of the run.
    """
    return idle_s < _IDLE_SHARE * limits.wall_s


def _stopped(report: RunReport, limits: ResourceLimits, idle_s: float) -> TestResult | None:
    """The result of a run that did not compile or hit a limit; None for any other."""
    match report.end:
        case "cpu":
            return TestResult("timeout", f"more than {limits.cpu_s:g} s of CPU time", report.wall_s)
        case "wall":
            is_doubtful = may_be_starved(idle_s, limits)
            return TestResult("timeout", f"more than {limits.wall_s:g} s", report.wall_s, is_doubtful)
        case "memory" | "processes" | "files":
            return TestResult("runtime_error", f"more {report.end} than allowed", report.wall_s)
    if report.syntax_error is not None:
        return TestResult("syntax_error", report.syntax_error, report.wall_s)
    return None


def _ending(report: RunReport) -> str:
    """How a process ended, in readable form."""
    errors, status = report.stderr.strip().splitlines(), report.exit_code
    ended = f"killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
    return f"{errors[-1].strip()} ({ended})" if errors else ended


def _difference(actual: str, expected: str, match: Callable[[str, str], bool]) -> str:
    """How two outputs differ: their beginnings, or in long ones the first line or word that differs."""
    place = ""
    if max(len(actual), len(expected)) > _SHOWN_CHARS and (found := _first_difference(actual, expected, match)):
        place, actual, expected = found
    return f"{place}printed {_shown(actual)}, expected {_shown(expected)}"


def _first_difference(actual: str, expected: str, match: Callable[[str, str], bool]) -> tuple[str, str, str] | None:
    """Place, actual and expected text of the first line that differs; of its first word that does if it is long.

    Returns:
        None if the first line differs from its beginning, or the place is not found in the first `_SCANNED_CHARS`
        characters from the first line that is not the same text.
    """
    actual, expected = actual.strip(), expected.strip()
    start = _end_of_same_lines(actual, expected)
    end = start + _SCANNED_CHARS
    ours, theirs = actual[start:end].split("\n"), expected[start:end].split("\n")
    # the last line of a part is not complete
    num_complete = [len(lines) - 1 for text, lines in ((actual, ours), (expected, theirs)) if len(text) > end]
    pairs = islice(zip_longest(ours, theirs, fillvalue=""), min(num_complete, default=None))
    for number, (line, wanted) in enumerate(pairs, actual.count("\n", 0, start) + 1):
        if line == wanted or match(line, wanted):
            continue
        if max(len(line), len(wanted)) <= _SHOWN_CHARS:
            return (f"line {number}: ", line, wanted) if number > 1 else None
        words = zip_longest(line.split(), wanted.split(), fillvalue="")
        for at, (word, wanted_word) in enumerate(words, 1):
            if word != wanted_word and not match(word, wanted_word):
                return (f"line {number}, word {at}: ", word, wanted_word) if number + at > 2 else None
    return None


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")


# Outputs of programs

_BLOCK_CHARS = 1 << 14
"""Characters whose tokens are in memory at the same time."""
_TOKEN = re.compile(r"\n|\S+")
_SPACE = re.compile(r"\s")
_INTEGER = re.compile(r"([+-]?)([0-9]+)")
_DECIMAL = re.compile(r"([+-]?)(?=\.?[0-9])([0-9]*)(?:\.([0-9]*))?")


def outputs_match(actual: str, expected: str, tolerance: float | None, any_case: bool = False) -> bool:
    """Whether two outputs are equal line by line, ignoring white space within lines and blank lines at both ends.

    Outputs may be megabytes of line breaks: the comparison ends at the first difference, and its memory does not depend
    on the number of lines or tokens.

    Args:
        actual: the program's output.
        expected: the expected output.
        tolerance: largest absolute or relative difference between two finite numbers at the same place. Integers must
            be equal, because a count of 10^9 must not be off by 1000. None requires equal text, except that the value
            of a decimal number counts: `0.5` equals an expected `0.50`.
        any_case: whether letters may be in upper or lower case.
    """
    if any_case:
        actual, expected = actual.casefold(), expected.casefold()
    actual, expected = actual.strip(), expected.strip()
    if actual == expected:
        return True
    start = _end_of_same_lines(actual, expected)
    pairs = zip_longest(_tokens(actual, start), _tokens(expected, start))
    return all(
        ours == theirs or (ours and theirs and "\n" not in (ours, theirs) and _same(ours, theirs, tolerance))
        for ours, theirs in pairs
    )


def _end_of_same_lines(actual: str, expected: str) -> int:
    """The start of a line before which both texts are equal, at most a block and a line before they differ."""
    start, end = 0, min(len(actual), len(expected))
    while start < end and actual[start : start + _BLOCK_CHARS] == expected[start : start + _BLOCK_CHARS]:
        start += _BLOCK_CHARS
    return actual.rfind("\n", 0, min(start, end)) + 1


def _tokens(text: str, start: int) -> Iterator[str]:
    """The words and line breaks of a text, in order."""
    while start < len(text):
        space = _SPACE.search(text, start + _BLOCK_CHARS)
        end = space.start() if space else len(text)
        yield from _TOKEN.findall(text, start, end)
        start = end


def _same(actual: str, expected: str, tolerance: float | None) -> bool:
    if actual == expected:
        return True
    if "." in expected and (value := _decimal(expected)) is not None and value == _decimal(actual):
        return True
    if tolerance is None:
        return False
    ours, theirs = _integer(actual), _integer(expected)
    if ours is not None and theirs is not None:
        return ours == theirs
    number, wanted = _finite(actual), _finite(expected)
    if number is None or wanted is None:
        return False
    return math.isclose(number, wanted, rel_tol=tolerance, abs_tol=tolerance)


def _integer(token: str) -> tuple[bool, str] | None:
    """Sign and digits of an integer, without leading zeros. `int` would refuse thousands of digits."""
    match = _INTEGER.fullmatch(token)
    if match is None:
        return None
    digits = match[2].lstrip("0")
    return match[1] == "-" and digits != "", digits


def _decimal(token: str) -> tuple[bool, str, str] | None:
    """Sign, integer and fractional digits of a decimal number, without zeros that do not change its value."""
    match = _DECIMAL.fullmatch(token)
    if match is None:
        return None
    whole, fraction = match[2].lstrip("0"), (match[3] or "").rstrip("0")
    return match[1] == "-" and whole + fraction != "", whole, fraction


def _finite(token: str) -> float | None:
    """The number that a token represents; "1_000", which Python accepts, is not a number in an output."""
    try:
        number = float(token)
    except ValueError:
        return None
    return number if math.isfinite(number) and "_" not in token else None
