"""What a zygote imports before it forks, by its role."""

from __future__ import annotations

# What programs of this kind import, so that each run only pays for a fork. Not `threading` and `hashlib`: the one runs
# code in every fork, the other maps libraries, and each makes every fork half as expensive again.
MODULES = {
    "answer": (
        *("abc", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions"),
        *("functools", "heapq", "io", "itertools", "json", "math", "operator", "random", "re", "statistics", "string"),
        "typing",
    ),
    # a tester that serves one test after the other may serve those that need no others (`judge/footprint.py`)
    "tester": (
        *("bisect", "cmath", "collections", "collections.abc", "copy", "fractions", "functools", "heapq", "itertools"),
        *("math", "operator", "random", "re", "string", "typing"),
    ),
}
