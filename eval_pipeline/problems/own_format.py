"""A problem format of the user's own: a function from a row to a problem, checked as it is used."""

from __future__ import annotations

from collections.abc import Callable

from eval_pipeline.problems.problem import FunctionTests, Problem, ProgramTests, ReferenceAnswer
from eval_pipeline.problems.record import Record
from verl_ext.errors import UserError, one_line
from verl_ext.own_code import OwnCode


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
        """Load it; the arguments are those of `OwnCode.named`.

        Raises:
            UserError: it cannot be loaded, or is no function.
        """
        function = OwnCode.named(text, key).load()
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
        return problem
