"""Modules import one way, and folders only what docs/architecture.md says, so that a reader can start anywhere."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (.+) \| (.*) \|$", re.MULTILINE)
ROWS = {folder: (purpose, imports) for folder, purpose, imports in ROW.findall(PAGE.partition("## Folders\n")[2])}
WITH_TORCH = "verl_ext.collective"
"""Of the modules beside the folders the one that not every folder may import."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for folder in ("verl_ext", "eval_pipeline") for path in (ROOT / folder).rglob("*.py")}
BESIDE = {name for name in MODULES if name.startswith("verl_ext.") and MODULES[name].parent == ROOT / "verl_ext"}


@cache
def imported_modules(path: Path) -> set[str]:
    """Everything that a file imports, also inside functions; of our own packages the modules themselves."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & MODULES.keys()) | ({node.module} if names - MODULES.keys() else set())
    return found


def package_of(folder: str) -> str:
    return folder if folder == "eval_pipeline" else f"verl_ext.{folder}"


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def imports_of(package: str) -> set[str]:
    """What the modules of a package import of our own, beside what is in it."""
    paths = [path for name, path in MODULES.items() if is_in(name, package)]
    ours = {name for path in paths for name in imported_modules(path) if name in MODULES}
    return {name for name in ours if not is_in(name, package)} - {"verl_ext"}


def test_every_folder_says_what_it_is_for() -> None:
    folders = {path.parent.name for path in (ROOT / "verl_ext").glob("*/__init__.py")} | {"eval_pipeline"}
    assert set(ROWS) == folders
    for folder, (purpose, _) in ROWS.items():
        docstring = ast.get_docstring(ast.parse(MODULES[package_of(folder)].read_text())) or ""
        assert docstring.splitlines()[0].rstrip(".") == purpose


@pytest.mark.parametrize("folder", ROWS)
def test_a_folder_imports_what_the_page_says(folder: str) -> None:
    told = {
        name if name.startswith("eval_") else f"verl_ext.{name}" for name in re.findall(r"`(.+?)`", ROWS[folder][1])
    }
    found = imports_of(package_of(folder)) - (BESIDE - {WITH_TORCH})
    assert not {name for name in found if not any(is_in(name, each) for each in told)}, "not on the page"
    assert not {each for each in told if not any(is_in(name, each) for name in found)}, "on the page, and not imported"


def test_modules_beside_the_folders_import_one_another_alone() -> None:
    assert WITH_TORCH in BESIDE
    for name in BESIDE:
        assert imported_modules(MODULES[name]) & MODULES.keys() <= BESIDE, name


def test_no_module_of_the_package_imports_itself_by_way_of_others() -> None:
    ours = {name: path for name, path in MODULES.items() if is_in(name, "verl_ext")}
    graph = {name: imported_modules(path) & ours.keys() for name, path in ours.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(ours)


def test_only_the_model_class_for_lmms_eval_imports_it() -> None:
    users = [
        path for path in MODULES.values() if any(name.split(".")[0] == "lmms_eval" for name in imported_modules(path))
    ]
    assert users == [ROOT / "eval_pipeline/lmms/models/budget_controller.py"]
