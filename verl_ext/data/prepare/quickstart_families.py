"""The function families of the quickstart: 20 with only correct training answers, 10 with mostly wrong ones.

A family is a kind of small function whose parameters yield many different problems. Each wrong body has one plausible
mistake, which gives a wrong value but never raises an exception, so that GRPO has something to correct.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

Parameters = dict[str, int]


@dataclass(frozen=True)
class FunctionFamily:
    """Templates for a kind of function; their fields are its parameters, `k`, or `a` and a greater `b`.

    Attributes:
        name: name of the family.
        signature: signature of the function.
        instruction: description of the return value for the prompt.
        body: lines after the signature.
        calls: expressions whose values the tests compare, separated by semicolons; `{f}` is the function's name.
        wrong_body: the body with the mistake; None for a family without one.
    """

    name: str
    signature: str
    instruction: str
    body: str
    calls: str
    wrong_body: str | None = None

    def sample(self, generator: random.Random) -> Parameters:
        """Sample the parameters: `k` from 2 to 999, or `a` and `b` from 2 to 99."""
        if "{k}" in self.signature:
            return {"k": generator.randint(2, 999)}
        first, second = sorted(generator.sample(range(2, 100), 2))
        return {"a": first, "b": second}

    def function_name(self, parameters: Parameters) -> str:
        """The name of the function."""
        return self.signature.format(**parameters).partition("(")[0]

    def prompt(self, parameters: Parameters) -> str:
        """The prompt for a function: its signature and the instruction, with `parameters` filled in."""
        return f"Write {self.signature}: {self.instruction}.".format(**parameters)

    def solution(self, parameters: Parameters) -> str:
        """The code of the correct function."""
        return self._code(self.body, parameters)

    def buggy_solution(self, parameters: Parameters) -> str | None:
        """The code of the function with the family's mistake; None for a family without one."""
        return None if self.wrong_body is None else self._code(self.wrong_body, parameters)

    def expressions(self, parameters: Parameters) -> list[str]:
        """The expressions that the tests evaluate."""
        return self.calls.format(f=self.function_name(parameters), **parameters).split("; ")

    def _code(self, body: str, parameters: Parameters) -> str:
        return "\n    ".join([f"def {self.signature}:", *body.splitlines()]).format(**parameters)


NUMBERS = "{f}(0); {f}(1); {f}({k}); {f}(5000)"
LISTS = "{f}([]); {f}([{k}]); {f}([1, {k}, 1000]); {f}([{k}, 0, {k}])"
ENDS = "{f}()[0]; {f}()[-1]; len({f}())"

# columns: name, signature, instruction, body, calls, wrong_body
CORRECT_FAMILIES = (
    FunctionFamily("add", "add_{k}(x)", "x plus {k}", "return x + {k}", NUMBERS),
    FunctionFamily("subtract", "sub_{k}(x)", "x minus {k}", "return x - {k}", NUMBERS),
    FunctionFamily("subtract_from", "from_{k}(x)", "{k} minus x", "return {k} - x", NUMBERS),
    FunctionFamily("multiply", "times_{k}(x)", "x times {k}", "return x * {k}", NUMBERS),
    FunctionFamily("remainder", "mod_{k}(x)", "remainder of x by {k}", "return x % {k}", NUMBERS),
    FunctionFamily("divisible", "div_{k}(x)", "whether {k} divides x", "return x % {k} == 0", NUMBERS),
    FunctionFamily("at_least", "floor_{k}(x)", "x but at least {k}", "return max(x, {k})", NUMBERS),
    FunctionFamily("at_most", "cap_{k}(x)", "x but at most {k}", "return min(x, {k})", NUMBERS),
    FunctionFamily("linear", "line_{a}_{b}(x)", "x times {a} plus {b}", "return x * {a} + {b}",
        "{f}(0); {f}(1); {f}(-7); {f}({a})"),
    FunctionFamily("choose", "pick_{a}_{b}(x)", "{a} if x else {b}", "return {a} if x else {b}",
        "{f}(True); {f}(False); {f}([]); {f}('a')"),
    FunctionFamily("reduce_above", "cut_{a}_{b}(x)", "x minus {a} if x is over {b} else x",
        "if x > {b}:\n    return x - {a}\nreturn x", "{f}(0); {f}({b}); {f}({b} + 1); {f}(500)"),
    FunctionFamily("append", "push_{k}(xs)", "xs with {k} at the end", "return xs + [{k}]", LISTS),
    FunctionFamily("prepend", "front_{k}(xs)", "xs with {k} at the front", "return [{k}] + xs", LISTS),
    FunctionFamily("count", "count_{k}(xs)", "how often {k} is in xs", "return xs.count({k})", LISTS),
    FunctionFamily("contains", "has_{k}(xs)", "whether {k} is in xs", "return {k} in xs", LISTS),
    FunctionFamily("remove", "no_{k}(xs)", "items of xs that are not {k}", "return [x for x in xs if x != {k}]", LISTS),
    FunctionFamily("add_each", "shift_{k}(xs)", "{k} added to each of xs", "return [x + {k} for x in xs]", LISTS),
    FunctionFamily("sum_plus", "total_{k}(xs)", "sum of xs plus {k}", "return sum(xs) + {k}", LISTS),
    FunctionFamily("suffix", "tag_{k}(s)", "s followed by '{k}'", "return s + '{k}'",
        "{f}(''); {f}('a'); {f}('item ')"),
    FunctionFamily("replace", "swap_{a}_{b}(s)", "s with '{a}' replaced by '{b}'", "return s.replace('{a}', '{b}')",
        "{f}('{a}'); {f}('{b}-{a}-{a}'); {f}(''); {f}('none here')"),
)  # fmt: skip

BUGGY_FAMILIES = (
    FunctionFamily("over", "over_{k}(x)", "whether x is over {k}", "return x > {k}",
        "{f}(0); {f}({k} - 1); {f}({k}); {f}({k} + 1)", "return x >= {k}"),
    FunctionFamily("between", "in_{a}_{b}(x)", "whether x is from {a} to {b}", "return {a} <= x <= {b}",
        "{f}({a} - 1); {f}({a}); {f}({b}); {f}({b} + 1)", "return {a} <= x < {b}"),
    FunctionFamily("count_up", "upto_{k}()", "list from 1 to {k}", "return list(range(1, {k} + 1))",
        ENDS, "return list(range(1, {k}))"),
    FunctionFamily("count_down", "down_{k}()", "list from {k} down to 1", "return list(range({k}, 0, -1))",
        ENDS, "return list(range({k}, 1, -1))"),
    FunctionFamily("sum_range", "sum_{k}(n)", "sum from {k} to n", "return sum(range({k}, n + 1))",
        "{f}({k} - 1); {f}({k}); {f}({k} + 2)", "return sum(range({k}, n))"),
    FunctionFamily("first_items", "first_{k}(xs)", "first {k} items of xs", "return xs[:{k}]",
        "{f}([]); len({f}(list(range(2000)))); {f}(list(range(2000)))[-1]", "return xs[:{k} - 1]"),
    FunctionFamily("skip_items", "skip_{k}(xs)", "xs without its first {k} items", "return xs[{k}:]",
        "{f}([]); len({f}(list(range(2000)))); {f}(list(range(2000)))[0]", "return xs[{k} + 1:]"),
    FunctionFamily("item_number", "item_{k}(xs)", "item {k} of xs counting from 1", "return xs[{k} - 1]",
        "{f}(list(range(2000))); {f}(list(range(1, 1001))); {f}('ab' * 600)", "return xs[{k}]"),
    FunctionFamily("pages", "pages_{k}(n)", "pages for n items with {k} on each", "return (n + {k} - 1) // {k}",
        "{f}(0); {f}({k}); {f}({k} + 1); {f}(5000)", "return n // {k}"),
    FunctionFamily("keep_large", "keep_{k}(xs)", "items of xs of at least {k}", "return [x for x in xs if x >= {k}]",
        "{f}([]); {f}([{k} - 1, {k}, {k} + 1]); {f}([{k}]); {f}([0, 5000])", "return [x for x in xs if x > {k}]"),
)  # fmt: skip

FAMILIES = (*CORRECT_FAMILIES, *BUGGY_FAMILIES)
