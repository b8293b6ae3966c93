"""A family: one kind of small function, with numbers that make it many different problems."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Parameters = dict[str, int]
Draw = Callable[[random.Random], Parameters]


@dataclass(frozen=True)
class Family:
    """Templates of one kind of function; `{f}` is the function's name and the rest are parameters.

    Attributes:
        name: identifies the family.
        entry_point: template of the function's name.
        instruction: template of what the function returns, as the instruction says it.
        head: the function's argument list.
        body: template of the lines after the signature.
        bug: the body of the plausible mistake that most training answers make; None for a family without one.
        calls: templates of expressions whose values the tests compare.
        draw: draws the parameters.
    """

    name: str
    entry_point: str
    head: str
    instruction: str
    body: str
    calls: tuple[str, ...]
    draw: Draw
    bug: str | None = None

    def function_name(self, parameters: Parameters) -> str:
        """Fill in the function's name."""
        return self.entry_point.format(**parameters)

    def prompt(self, parameters: Parameters) -> str:
        """Fill in the whole instruction."""
        signature = self.function_name(parameters) + self.head
        return f"Write {signature}: {self.instruction.format(**parameters)}."

    def solution(self, parameters: Parameters) -> str:
        """Fill in the right function."""
        return self._code(self.body, parameters)

    def buggy_solution(self, parameters: Parameters) -> str | None:
        """Fill in the function with the family's mistake; None when it has none."""
        return None if self.bug is None else self._code(self.bug, parameters)

    def expressions(self, parameters: Parameters) -> list[str]:
        """Fill in the calls that the tests make."""
        return [call.format(f=self.function_name(parameters), **parameters) for call in self.calls]

    def _code(self, body: str, parameters: Parameters) -> str:
        lines = body.format(**parameters).splitlines()
        indented = "\n".join(f"    {line}" for line in lines)
        return f"def {self.function_name(parameters)}{self.head}:\n{indented}"


def integer(low: int, high: int) -> Draw:
    """Draw `k` between `low` and `high`, both included."""
    return lambda generator: {"k": generator.randint(low, high)}


def integer_pair(low: int, high: int) -> Draw:
    """Draw `a` and a greater `b`, both included in `low` to `high`."""

    def draw(generator: random.Random) -> Parameters:
        first, second = sorted(generator.sample(range(low, high + 1), 2))
        return {"a": first, "b": second}

    return draw
