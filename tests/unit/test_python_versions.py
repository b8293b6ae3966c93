"""The code keeps to what every version of Python has that pyproject.toml allows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT

FOLDERS = ("verl_ext", "eval_pipeline", "benchmarks", "examples", "tests")
SET = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
SINCE_3_11 = re.compile(r"(?<!\\)(?:[*+?]|\{[0-9,]+\})\+|\(\?>")
"""Possessive quantifiers and atomic groups: Python 3.10 refuses them, and before 3.11.5 they match wrongly."""


def needs_3_11(pattern: str) -> bool:
    """Whether a pattern for `re` does; what stands in sets counts as plain characters."""
    return SINCE_3_11.search(SET.sub("x", pattern)) is not None


def patterns(source: str) -> Iterator[str]:
    """The texts that are handed to functions of `re`, with a 0 for what is put into them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and node.args:
            parts = node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else [node.args[0]]
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in parts)


@pytest.mark.parametrize(
    ("pattern", "needs"),
    [(r"a++b", True), (r"[^`]*+", True), (r"x{2,}+", True), (r"(?>a)", True), (r"[*+]+", False), (r"\++", False)],
)
def test_what_needs_3_11_is_known(pattern: str, needs: bool) -> None:
    assert needs_3_11(pattern) == needs


def test_no_pattern_needs_3_11() -> None:
    paths = [path for folder in FOLDERS for path in sorted(Path(ROOT, folder).rglob("*.py"))]
    found = [(path.name, pattern) for path in paths for pattern in patterns(path.read_text())]
    assert len(found) > 100
    assert not [(name, pattern) for name, pattern in found if name != Path(__file__).name and needs_3_11(pattern)]
