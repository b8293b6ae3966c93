"""Rows of a dataset, and user-defined problem formats, which turn rows into problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eval_pipeline.judge import FunctionTests, ProgramCase, ProgramTests, ReferenceAnswer, ScoredAnswer, Tests
from eval_pipeline.problems.problem import Problem
from eval_pipeline.problems.python_source import PARSE_ERRORS, fault_of_test, parse
from verl_ext.errors import UserError, one_line
from verl_ext.plugins import Plugin

_MAX_SHOWN_KEYS = 12


@dataclass(frozen=True)
class Record:
    """One row. A method with several keys reads the first one that is present."""

    where: str
    """Place of the row for messages, such as `mbpp.jsonl, line 3`."""
    number: int
    """The number of the line or row, from 1."""
    fields: Mapping[str, Any]

    def text(self, *keys: str) -> str:
        """A non-blank string; anything else raises a `UserError`."""
        value = self._required(keys)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"{_either(keys)} must be a string that is not empty")
        return self._encodable(value, keys)

    def optional_text(self, *keys: str) -> str | None:
        """Like `text`, or None if the key is missing or null."""
        return None if self.first(*keys) is None else self.text(*keys)

    def optional_code(self, key: str) -> str:
        """Source text that may be blank; empty if the key is missing or null."""
        value = self.fields.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.error(f"{key!r} must be a string")
        return self._encodable(value, (key,))

    def texts(self, key: str) -> list[str]:
        """A list of strings, which may be empty; empty if the key is missing or null."""
        value = self.fields.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"{key!r} must be a list of strings")
        return [self._encodable(item, (key,)) for item in value]

    def identifier(self, *keys: str) -> str:
        """An id of the row: a non-blank string, or an integer."""
        value = self._required(keys)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, str) and value.strip():
            return self._encodable(value, keys)
        raise self.error(f"{_either(keys)} must be a string that is not empty or an integer")

    def first(self, *keys: str) -> Any:
        """The unchecked value of the first key that is present and not null; None if there is none."""
        return next((self.fields[key] for key in keys if self.fields.get(key) is not None), None)

    def _required(self, keys: tuple[str, ...]) -> Any:
        if (value := self.first(*keys)) is None:
            present = [repr(key) for key, other in self.fields.items() if other is not None]
            shown = [*present[:_MAX_SHOWN_KEYS], *(["..."] if len(present) > _MAX_SHOWN_KEYS else [])]
            raise self.error(
                f"the row has no {_either(keys)} (keys with a value: {', '.join(shown) or 'none'}); rename a key or "
                "specify another format"
            )
        return value

    def error(self, what: str) -> UserError:
        """The exception to raise for this row."""
        return UserError(f"{self.where}: {what}")

    def _encodable(self, value: str, keys: tuple[str, ...]) -> str:
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which no tokenizer accepts
            raise self.error(
                f"{_either(keys)} is not valid Unicode ({error.reason}); correct the \\u escape"
            ) from error
        return value


def _either(keys: tuple[str, ...]) -> str:
    *others, last = map(repr, keys)
    return f"{', '.join(others)} or {last}" if others else last


# User-defined formats


def load_format(text: str, key: str) -> Callable[[Record], Problem]:
    """Load a user-defined problem format: `function(record: Record) -> Problem`, whose problems are checked.

    For the arguments, see `Plugin.parse`. The returned function raises a `UserError` if a row does not have this
    format, or if the user's function does not return a problem.

    Raises:
        UserError: the function cannot be loaded, or is not a function.
    """
    function = Plugin.parse(text, key).load()
    if not callable(function):
        raise UserError(
            f"{key} is {text!r}, which is not a function; specify one that takes a Record and returns a Problem"
        )

    def parse_problem(record: Record) -> Problem:
        try:
            problem = function(record)
        except UserError:
            raise
        except Exception as error:  # anything that the user's function raises
            raise record.error(f"{text} failed ({one_line(error)}); correct the row or the function") from error
        return _checked(problem, text, record)

    return parse_problem


def _checked(problem: object, format: str, record: Record) -> Problem:
    if not isinstance(problem, Problem) or not isinstance(
        problem.tests, FunctionTests | ProgramTests | ReferenceAnswer | ScoredAnswer
    ):
        raise record.error(
            f"{format} returned {type(problem).__name__} instead of a Problem with tests; correct the function"
        )
    for name in ("problem_id", "prompt"):
        if not _is_text(value := getattr(problem, name)):
            raise record.error(
                f"{format} returned a Problem whose {name} is {value!r}; it must be a string that is not empty"
            )
    if (fault := _fault_of(problem.tests)) is not None:
        raise record.error(
            f"{format} returned the problem {problem.problem_id!r}, {fault}; correct the row or the function"
        )
    return problem


def _fault_of(tests: Tests) -> str | None:
    """Why the tests cannot judge answers; None if they can. The judge relies on these checks."""
    if isinstance(tests, ScoredAnswer):
        return None if _is_text(tests.task) and _is_text(tests.entry) else "whose task or entry is not text"
    if isinstance(tests, ReferenceAnswer):
        return None if _is_text(tests.answer) else f"whose reference answer is {tests.answer!r}, not a non-empty string"
    given = tests.tests if isinstance(tests, FunctionTests) else tests.cases
    if not isinstance(given, list | tuple) or not given:
        return "which has no tests" if not given else f"whose tests are {given!r}, not a tuple"
    return _fault_of_function(tests) if isinstance(tests, FunctionTests) else _fault_of_program(tests)


def _fault_of_function(tests: FunctionTests) -> str | None:
    if not _is_text(tests.entry_point) or not tests.entry_point.isidentifier():
        return f"whose entry_point is {tests.entry_point!r}, not the bare name of a function or class"
    if not isinstance(tests.code_prompt, str):
        return f"whose code_prompt is {tests.code_prompt!r}, not a string"
    sources = {"preamble": tests.preamble, **{f"tests[{index}]": test for index, test in enumerate(tests.tests)}}
    for name, source in sources.items():
        if not isinstance(source, str) or (name != "preamble" and not source.strip()):
            return f"whose {name} is {source!r}, not Python source"
        try:
            tree = parse(source)
        except PARSE_ERRORS as error:
            return f"whose {name} is not Python ({one_line(error)})"
        if name != "preamble" and (fault := fault_of_test(tree, needs_assert=False)) is not None:
            return f"whose {name} {fault}"
    return None


def _fault_of_program(tests: ProgramTests) -> str | None:
    for index, case in enumerate(tests.cases):
        if not isinstance(case, ProgramCase) or not isinstance(case.stdin, str) or not isinstance(case.expected, str):
            return f"whose cases[{index}] is {case!r}, not a ProgramCase of two strings"
    if not isinstance(tests.tolerance, int | float | None):
        return f"whose tolerance is {tests.tolerance!r}, not a number or None"
    if not isinstance(tests.any_case, bool):
        return f"whose any_case is {tests.any_case!r}, not true or false"
    return None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
