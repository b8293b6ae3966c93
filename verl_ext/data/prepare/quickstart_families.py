"""The function families of the quickstart: 20 that training answers always solve, 10 that most answers get wrong.

A family is one kind of small function, with parameters that make many different problems of it. Each wrong body holds
one plausible mistake, which gives a wrong value but never raises an exception, so that GRPO has something to correct.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Parameters = dict[str, int]
Sampler = Callable[[random.Random], Parameters]


@dataclass(frozen=True)
class FunctionFamily:
    """Templates of one kind of function; `{f}` is the function's name and the other fields are parameters.

    Attributes:
        name: identifies the family.
        entry_point: template of the function's name.
        head: the function's argument list.
        instruction: template of what the function returns, as the instruction says it.
        body: template of the lines after the signature.
        calls: templates of expressions whose values the tests compare.
        sample: samples the parameters.
        wrong_body: template of the body with the plausible mistake; None for a family without one.
    """

    name: str
    entry_point: str
    head: str
    instruction: str
    body: str
    calls: tuple[str, ...]
    sample: Sampler
    wrong_body: str | None = None

    def function_name(self, parameters: Parameters) -> str:
        """The name of the function."""
        return self.entry_point.format(**parameters)

    def prompt(self, parameters: Parameters) -> str:
        """The whole instruction."""
        signature = self.function_name(parameters) + self.head
        return f"Write {signature}: {self.instruction.format(**parameters)}."

    def solution(self, parameters: Parameters) -> str:
        """The code of the correct function."""
        return self._code(self.body, parameters)

    def buggy_solution(self, parameters: Parameters) -> str | None:
        """The code of the function with the family's mistake; None for a family without one."""
        return None if self.wrong_body is None else self._code(self.wrong_body, parameters)

    def expressions(self, parameters: Parameters) -> list[str]:
        """The calls that the tests make."""
        return [call.format(f=self.function_name(parameters), **parameters) for call in self.calls]

    def _code(self, body: str, parameters: Parameters) -> str:
        lines = body.format(**parameters).splitlines()
        indented = "\n".join(f"    {line}" for line in lines)
        return f"def {self.function_name(parameters)}{self.head}:\n{indented}"


def integer(low: int, high: int) -> Sampler:
    """Sample `k` between `low` and `high`, both included."""
    return lambda generator: {"k": generator.randint(low, high)}


def integer_pair(low: int, high: int) -> Sampler:
    """Sample `a` and a greater `b` between `low` and `high`, both included."""

    def sample(generator: random.Random) -> Parameters:
        first, second = sorted(generator.sample(range(low, high + 1), 2))
        return {"a": first, "b": second}

    return sample


ANY = integer(2, 999)
PAIR = integer_pair(2, 99)
NUMBERS = ("{f}(0)", "{f}(1)", "{f}({k})", "{f}(5000)")
LISTS = ("{f}([])", "{f}([{k}])", "{f}([1, {k}, 1000])", "{f}([{k}, 0, {k}])")
LONG = "list(range(2000))"

CORRECT_FAMILIES = (
    FunctionFamily("add", "add_{k}", "(x)", "x plus {k}", "return x + {k}", NUMBERS, ANY),
    FunctionFamily("subtract", "sub_{k}", "(x)", "x minus {k}", "return x - {k}", NUMBERS, ANY),
    FunctionFamily("subtract_from", "from_{k}", "(x)", "{k} minus x", "return {k} - x", NUMBERS, ANY),
    FunctionFamily("multiply", "times_{k}", "(x)", "x times {k}", "return x * {k}", NUMBERS, ANY),
    FunctionFamily("remainder", "mod_{k}", "(x)", "remainder of x by {k}", "return x % {k}", NUMBERS, ANY),
    FunctionFamily("divisible", "div_{k}", "(x)", "whether {k} divides x", "return x % {k} == 0", NUMBERS, ANY),
    FunctionFamily("at_least", "floor_{k}", "(x)", "x but at least {k}", "return max(x, {k})", NUMBERS, ANY),
    FunctionFamily("at_most", "cap_{k}", "(x)", "x but at most {k}", "return min(x, {k})", NUMBERS, ANY),
    FunctionFamily(
        "linear",
        "line_{a}_{b}",
        "(x)",
        "x times {a} plus {b}",
        "return x * {a} + {b}",
        ("{f}(0)", "{f}(1)", "{f}(-7)", "{f}({a})"),
        PAIR,
    ),
    FunctionFamily(
        "choose",
        "pick_{a}_{b}",
        "(x)",
        "{a} if x else {b}",
        "return {a} if x else {b}",
        ("{f}(True)", "{f}(False)", "{f}([])", "{f}('a')"),
        PAIR,
    ),
    FunctionFamily(
        "reduce_above",
        "cut_{a}_{b}",
        "(x)",
        "x minus {a} if x is over {b} else x",
        "if x > {b}:\n    return x - {a}\nreturn x",
        ("{f}(0)", "{f}({b})", "{f}({b} + 1)", "{f}(500)"),
        PAIR,
    ),
    FunctionFamily("append", "push_{k}", "(xs)", "xs with {k} at the end", "return xs + [{k}]", LISTS, ANY),
    FunctionFamily("prepend", "front_{k}", "(xs)", "xs with {k} at the front", "return [{k}] + xs", LISTS, ANY),
    FunctionFamily("count", "count_{k}", "(xs)", "how often {k} is in xs", "return xs.count({k})", LISTS, ANY),
    FunctionFamily("contains", "has_{k}", "(xs)", "whether {k} is in xs", "return {k} in xs", LISTS, ANY),
    FunctionFamily(
        "remove",
        "no_{k}",
        "(xs)",
        "items of xs that are not {k}",
        "return [x for x in xs if x != {k}]",
        LISTS,
        ANY,
    ),
    FunctionFamily(
        "add_each", "shift_{k}", "(xs)", "{k} added to each of xs", "return [x + {k} for x in xs]", LISTS, ANY
    ),
    FunctionFamily("sum_plus", "total_{k}", "(xs)", "sum of xs plus {k}", "return sum(xs) + {k}", LISTS, ANY),
    FunctionFamily(
        "suffix",
        "tag_{k}",
        "(s)",
        "s followed by '{k}'",
        "return s + '{k}'",
        ("{f}('')", "{f}('a')", "{f}('item ')"),
        ANY,
    ),
    FunctionFamily(
        "replace",
        "swap_{a}_{b}",
        "(s)",
        "s with '{a}' replaced by '{b}'",
        "return s.replace('{a}', '{b}')",
        ("{f}('{a}')", "{f}('{b}-{a}-{a}')", "{f}('')", "{f}('none here')"),
        PAIR,
    ),
)

BUGGY_FAMILIES = (
    FunctionFamily(
        "over",
        "over_{k}",
        "(x)",
        "whether x is over {k}",
        "return x > {k}",
        ("{f}(0)", "{f}({k} - 1)", "{f}({k})", "{f}({k} + 1)"),
        ANY,
        wrong_body="return x >= {k}",
    ),
    FunctionFamily(
        "between",
        "in_{a}_{b}",
        "(x)",
        "whether x is from {a} to {b}",
        "return {a} <= x <= {b}",
        ("{f}({a} - 1)", "{f}({a})", "{f}({b})", "{f}({b} + 1)"),
        PAIR,
        wrong_body="return {a} <= x < {b}",
    ),
    FunctionFamily(
        "count_up",
        "upto_{k}",
        "()",
        "list from 1 to {k}",
        "return list(range(1, {k} + 1))",
        ("{f}()[0]", "{f}()[-1]", "len({f}())"),
        ANY,
        wrong_body="return list(range(1, {k}))",
    ),
    FunctionFamily(
        "count_down",
        "down_{k}",
        "()",
        "list from {k} down to 1",
        "return list(range({k}, 0, -1))",
        ("{f}()[0]", "{f}()[-1]", "len({f}())"),
        ANY,
        wrong_body="return list(range({k}, 1, -1))",
    ),
    FunctionFamily(
        "sum_range",
        "sum_{k}",
        "(n)",
        "sum from {k} to n",
        "return sum(range({k}, n + 1))",
        ("{f}({k} - 1)", "{f}({k})", "{f}({k} + 2)"),
        ANY,
        wrong_body="return sum(range({k}, n))",
    ),
    FunctionFamily(
        "first_items",
        "first_{k}",
        "(xs)",
        "first {k} items of xs",
        "return xs[:{k}]",
        ("{f}([])", f"len({{f}}({LONG}))", f"{{f}}({LONG})[-1]"),
        ANY,
        wrong_body="return xs[:{k} - 1]",
    ),
    FunctionFamily(
        "skip_items",
        "skip_{k}",
        "(xs)",
        "xs without its first {k} items",
        "return xs[{k}:]",
        ("{f}([])", f"len({{f}}({LONG}))", f"{{f}}({LONG})[0]"),
        ANY,
        wrong_body="return xs[{k} + 1:]",
    ),
    FunctionFamily(
        "item_number",
        "item_{k}",
        "(xs)",
        "item {k} of xs counting from 1",
        "return xs[{k} - 1]",
        (f"{{f}}({LONG})", "{f}(list(range(1, 1001)))", "{f}('ab' * 600)"),
        ANY,
        wrong_body="return xs[{k}]",
    ),
    FunctionFamily(
        "pages",
        "pages_{k}",
        "(n)",
        "pages for n items with {k} on each",
        "return (n + {k} - 1) // {k}",
        ("{f}(0)", "{f}({k})", "{f}({k} + 1)", "{f}(5000)"),
        ANY,
        wrong_body="return n // {k}",
    ),
    FunctionFamily(
        "keep_large",
        "keep_{k}",
        "(xs)",
        "items of xs of at least {k}",
        "return [x for x in xs if x >= {k}]",
        ("{f}([])", "{f}([{k} - 1, {k}, {k} + 1])", "{f}([{k}])", "{f}([0, 5000])"),
        ANY,
        wrong_body="return [x for x in xs if x > {k}]",
    ),
)

FAMILIES = (*CORRECT_FAMILIES, *BUGGY_FAMILIES)
