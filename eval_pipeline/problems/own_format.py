"""A problem format of the user's own: a function from a row to a problem, checked as it is used."""

from __future__ import annotations

from collections.abc import Callable

from eval_pipeline.judge import FunctionTests, ProgramCase, ProgramTests, ReferenceAnswer
from eval_pipeline.problems.problem import Problem
from eval_pipeline.problems.python_source import PARSE_ERRORS, parse
from eval_pipeline.problems.record import Record
from verl_ext.errors import UserError, one_line
from verl_ext.plugins import Plugin


class OwnFormat:
    """Calls `function(record: Record) -> Problem` for each row.

    Args:
        function: of the user's.
        name: of the function, for messages.
    """

    def __init__(self, function: Callable[[Record], Problem], name: str) -> None:
        self._function, self._name = function, name

    @classmethod
    def named(cls, text: str, key: str) -> OwnFormat:
        """Load it; the arguments are those of `Plugin.parse`.

        Raises:
            UserError: it cannot be loaded, or is no function.
        """
        function = Plugin.parse(text, key).load()
        if not callable(function):
            raise UserError(
                f"{key} is {text!r}, which is not a function; name one that takes a Record and returns a Problem"
            )
        return cls(function, text)

    def __call__(self, record: Record) -> Problem:
        """The problem of one row.

        Raises:
            UserError: the row is none of this format, or the function does not make a problem of it.
        """
        try:
            problem = self._function(record)
        except UserError:
            raise
        except Exception as error:  # whatever the user's function raises
            raise record.error(f"{self._name} failed ({one_line(error)}); correct the row or the function") from error
        return self._checked(problem, record)

    def _checked(self, problem: object, record: Record) -> Problem:
        if not isinstance(problem, Problem) or not isinstance(
            problem.tests, FunctionTests | ProgramTests | ReferenceAnswer
        ):
            raise record.error(
                f"{self._name} returned {type(problem).__name__} instead of a Problem with tests; correct the function"
            )
        for name in ("problem_id", "prompt"):
            value = getattr(problem, name)
            if not isinstance(value, str) or not value.strip():
                raise record.error(
                    f"{self._name} returned a Problem whose {name} is {value!r}; it must be a string that is not empty"
                )
        if (fault := _fault_of(problem.tests)) is not None:
            raise record.error(
                f"{self._name} returned the problem {problem.problem_id!r}, {fault}; correct the row or the function"
            )
        return problem


def _fault_of(tests: FunctionTests | ProgramTests | ReferenceAnswer) -> str | None:
    """Why no answer can be judged by these tests; None where it can. The judge relies on what is checked here."""
    if isinstance(tests, ReferenceAnswer):
        return None if _is_text(tests.answer) else f"whose reference answer is {tests.answer!r}, not a non-empty string"
    plugin = tests.tests if isinstance(tests, FunctionTests) else tests.cases
    if not isinstance(plugin, list | tuple) or not plugin:
        return "which has no tests" if not plugin else f"whose tests are {plugin!r}, not a tuple"
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
            parse(source)
        except PARSE_ERRORS as error:
            return f"whose {name} is not Python ({one_line(error)})"
    return None


def _fault_of_program(tests: ProgramTests) -> str | None:
    for index, case in enumerate(tests.cases):
        if not isinstance(case, ProgramCase) or not isinstance(case.stdin, str) or not isinstance(case.expected, str):
            return f"whose cases[{index}] is {case!r}, not a ProgramCase of two strings"
    if not isinstance(tests.tolerance, int | float | None):
        return f"whose tolerance is {tests.tolerance!r}, not a number or None"
    return None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
