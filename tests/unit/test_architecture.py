"""The walkthroughs in docs/design/architecture.md name existing files and functions and keep their length limits."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.helpers import ROOT

PAGE = (ROOT / "docs/design/architecture.md").read_text().partition("## Code walkthroughs\n")[2].partition("\n## ")[0]
WALKTHROUGHS = {
    title: body for title, body in re.findall(r"^### (.+?)\n(.+?)(?=^### |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
MAX_FILES = {
    "Start of SFT": 25,
    "One step of SFT": 4,
    "One step of GRPO": 13,
    "One evaluated checkpoint": 18,
    "One judged answer": 20,
    "One save": 8,
    "One resume": 8,
}


def stops_of(walkthrough: str) -> list[tuple[str, list[str]]]:
    """Each file of a walkthrough with the names that the page mentions in it."""
    rows = re.findall(r"^\d+\. `([^`]+)`(.*?)(?=^\d+\. |\Z)", WALKTHROUGHS[walkthrough], re.MULTILINE | re.DOTALL)
    return [(file, re.findall(r"`([\w.]+)`", said.partition(": ")[0])) for file, said in rows]


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module, methods as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, FUNCTIONS | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, FUNCTIONS)}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def test_page_has_expected_walkthroughs() -> None:
    assert list(WALKTHROUGHS) == list(MAX_FILES)


@pytest.mark.parametrize("walkthrough", MAX_FILES)
def test_walkthrough_is_short_and_names_exist(walkthrough: str) -> None:
    stops = stops_of(walkthrough)
    files = [file for file, _ in stops]
    assert 1 < len(files) <= MAX_FILES[walkthrough] and len({*files}) == len(files)
    for file, names in stops:
        path = ROOT / file
        assert path.is_file(), file
        if path.suffix == ".py":
            assert names and {*names} <= names_in(path), (file, {*names} - names_in(path))


def test_class_names_are_unique() -> None:
    files = defaultdict(set)
    for folder in ("verl_ext", "eval_pipeline"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    files[node.name].add(path.relative_to(ROOT))
    assert not {name: paths for name, paths in files.items() if len(paths) > 1}
