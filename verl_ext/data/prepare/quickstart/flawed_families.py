"""The families whose training answers mostly hold one plausible mistake, so that GRPO has something to mend.

Every mistake runs: it gives a wrong value, never an exception.
"""

from __future__ import annotations

from verl_ext.data.prepare.quickstart.family import Family, integer, integer_pair

MANY = "list(range(2000))"

FLAWED_FAMILIES = (
    Family(
        "over",
        "over_{k}",
        "(x)",
        "whether x is over {k}",
        "return x > {k}",
        ("{f}(0)", "{f}({k} - 1)", "{f}({k})", "{f}({k} + 1)"),
        integer(2, 999),
        bug="return x >= {k}",
    ),
    Family(
        "between",
        "in_{a}_{b}",
        "(x)",
        "whether x is from {a} to {b}",
        "return {a} <= x <= {b}",
        ("{f}({a} - 1)", "{f}({a})", "{f}({b})", "{f}({b} + 1)"),
        integer_pair(2, 99),
        bug="return {a} <= x < {b}",
    ),
    Family(
        "count_up",
        "upto_{k}",
        "()",
        "list from 1 to {k}",
        "return list(range(1, {k} + 1))",
        ("{f}()[0]", "{f}()[-1]", "len({f}())"),
        integer(2, 999),
        bug="return list(range(1, {k}))",
    ),
    Family(
        "count_down",
        "down_{k}",
        "()",
        "list from {k} down to 1",
        "return list(range({k}, 0, -1))",
        ("{f}()[0]", "{f}()[-1]", "len({f}())"),
        integer(2, 999),
        bug="return list(range({k}, 1, -1))",
    ),
    Family(
        "sum_range",
        "sum_{k}",
        "(n)",
        "sum from {k} to n",
        "return sum(range({k}, n + 1))",
        ("{f}({k} - 1)", "{f}({k})", "{f}({k} + 2)"),
        integer(2, 999),
        bug="return sum(range({k}, n))",
    ),
    Family(
        "first_items",
        "first_{k}",
        "(xs)",
        "first {k} items of xs",
        "return xs[:{k}]",
        ("{f}([])", f"len({{f}}({MANY}))", f"{{f}}({MANY})[-1]"),
        integer(2, 999),
        bug="return xs[:{k} - 1]",
    ),
    Family(
        "skip_items",
        "skip_{k}",
        "(xs)",
        "xs without its first {k} items",
        "return xs[{k}:]",
        ("{f}([])", f"len({{f}}({MANY}))", f"{{f}}({MANY})[0]"),
        integer(2, 999),
        bug="return xs[{k} + 1:]",
    ),
    Family(
        "item_number",
        "item_{k}",
        "(xs)",
        "item {k} of xs counting from 1",
        "return xs[{k} - 1]",
        (f"{{f}}({MANY})", "{f}(list(range(1, 1001)))", "{f}('ab' * 600)"),
        integer(2, 999),
        bug="return xs[{k}]",
    ),
    Family(
        "pages",
        "pages_{k}",
        "(n)",
        "pages for n items with {k} on each",
        "return (n + {k} - 1) // {k}",
        ("{f}(0)", "{f}({k})", "{f}({k} + 1)", "{f}(5000)"),
        integer(2, 999),
        bug="return n // {k}",
    ),
    Family(
        "keep_large",
        "keep_{k}",
        "(xs)",
        "items of xs of at least {k}",
        "return [x for x in xs if x >= {k}]",
        ("{f}([])", "{f}([{k} - 1, {k}, {k} + 1])", "{f}([{k}])", "{f}([0, 5000])"),
        integer(2, 999),
        bug="return [x for x in xs if x > {k}]",
    ),
)
