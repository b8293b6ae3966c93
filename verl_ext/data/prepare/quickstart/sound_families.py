"""The families that are taught right; with `flawed_families` they make the whole task."""

from __future__ import annotations

from verl_ext.data.prepare.quickstart.family import Family, integer, integer_pair

ANY = integer(2, 999)
NUMBERS = ("{f}(0)", "{f}(1)", "{f}({k})", "{f}(5000)")
LISTS = ("{f}([])", "{f}([{k}])", "{f}([1, {k}, 1000])", "{f}([{k}, 0, {k}])")

SOUND_FAMILIES = (
    Family("add", "add_{k}", "(x)", "x plus {k}", "return x + {k}", NUMBERS, ANY),
    Family("subtract", "sub_{k}", "(x)", "x minus {k}", "return x - {k}", NUMBERS, ANY),
    Family("subtract_from", "from_{k}", "(x)", "{k} minus x", "return {k} - x", NUMBERS, ANY),
    Family("multiply", "times_{k}", "(x)", "x times {k}", "return x * {k}", NUMBERS, ANY),
    Family("remainder", "mod_{k}", "(x)", "remainder of x by {k}", "return x % {k}", NUMBERS, ANY),
    Family("divisible", "div_{k}", "(x)", "whether {k} divides x", "return x % {k} == 0", NUMBERS, ANY),
    Family("at_least", "floor_{k}", "(x)", "x but at least {k}", "return max(x, {k})", NUMBERS, ANY),
    Family("at_most", "cap_{k}", "(x)", "x but at most {k}", "return min(x, {k})", NUMBERS, ANY),
    Family(
        "linear",
        "line_{a}_{b}",
        "(x)",
        "x times {a} plus {b}",
        "return x * {a} + {b}",
        ("{f}(0)", "{f}(1)", "{f}(-7)", "{f}({a})"),
        integer_pair(2, 99),
    ),
    Family(
        "choose",
        "pick_{a}_{b}",
        "(x)",
        "{a} if x else {b}",
        "return {a} if x else {b}",
        ("{f}(True)", "{f}(False)", "{f}([])", "{f}('a')"),
        integer_pair(2, 99),
    ),
    Family(
        "reduce_above",
        "cut_{a}_{b}",
        "(x)",
        "x minus {a} if x is over {b} else x",
        "if x > {b}:\n    return x - {a}\nreturn x",
        ("{f}(0)", "{f}({b})", "{f}({b} + 1)", "{f}(500)"),
        integer_pair(2, 99),
    ),
    Family("append", "push_{k}", "(xs)", "xs with {k} at the end", "return xs + [{k}]", LISTS, ANY),
    Family("prepend", "front_{k}", "(xs)", "xs with {k} at the front", "return [{k}] + xs", LISTS, ANY),
    Family("count", "count_{k}", "(xs)", "how often {k} is in xs", "return xs.count({k})", LISTS, ANY),
    Family("contains", "has_{k}", "(xs)", "whether {k} is in xs", "return {k} in xs", LISTS, ANY),
    Family(
        "remove",
        "no_{k}",
        "(xs)",
        "items of xs that are not {k}",
        "return [x for x in xs if x != {k}]",
        LISTS,
        ANY,
    ),
    Family("add_each", "shift_{k}", "(xs)", "{k} added to each of xs", "return [x + {k} for x in xs]", LISTS, ANY),
    Family("sum_plus", "total_{k}", "(xs)", "sum of xs plus {k}", "return sum(xs) + {k}", LISTS, ANY),
    Family(
        "suffix",
        "tag_{k}",
        "(s)",
        "s followed by '{k}'",
        "return s + '{k}'",
        ("{f}('')", "{f}('a')", "{f}('item ')"),
        ANY,
    ),
    Family(
        "replace",
        "swap_{a}_{b}",
        "(s)",
        "s with '{a}' replaced by '{b}'",
        "return s.replace('{a}', '{b}')",
        ("{f}('{a}')", "{f}('{b}-{a}-{a}')", "{f}('')", "{f}('none here')"),
        integer_pair(2, 99),
    ),
)
