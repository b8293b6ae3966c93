"""Imports of the product match the architecture page and are acyclic; tests share code only through `tests/helpers`."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers import ROOT

PAGE = (ROOT / "docs/design/architecture.md").read_text()
ROW = re.compile(r"^\| `([\w.]+)` \| (.+) \| (.*) \|$", re.MULTILINE)
ROWS = {folder: (purpose, imports) for folder, purpose, imports in ROW.findall(PAGE.partition("## Folders\n")[2])}
COMMAND_FOLDERS = {"data.prepare"}
"""Folders inside others that are commands and import more than the folder around them."""
EVALUATION = {"eval_pipeline", "eval_pipeline.problems", "eval_pipeline.judge"}
WITH_TORCH = {"verl_ext.distributed", "verl_ext.verl_api"}
"""The modules at the root that not every folder may import."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for folder in ("verl_ext", "eval_pipeline") for path in (ROOT / folder).rglob("*.py")}
COMMANDS = {"verl_ext.docgen", "verl_ext.trainer.__main__", "eval_pipeline.__main__", "eval_pipeline.lmms"}
"""Modules and packages above all folders; what lmms-eval loads by a plugin's name is a command too."""
BESIDE = {name for name in MODULES if name.startswith("verl_ext.") and MODULES[name].parent == ROOT / "verl_ext"}
BESIDE -= COMMANDS


@cache
def imported_modules(path: Path) -> set[str]:
    """All imports of a file, including those inside functions; for the product's packages, the modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & MODULES.keys()) | ({node.module} if names - MODULES.keys() else set())
    return found


def package_of(folder: str) -> str:
    return folder if is_in(folder, "eval_pipeline") else f"verl_ext.{folder}"


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def folder_of(module: str) -> str:
    """The innermost documented folder of a module; for a command or a top-level module, its name."""
    if command := next((each for each in COMMANDS if is_in(module, each)), None):
        return command
    folders = [folder for folder in ROWS if is_in(module, package_of(folder))]
    return max(folders, key=len, default=module)


def imports_of(folder: str) -> set[str]:
    """The product's modules outside a folder that its modules import."""
    paths = [path for name, path in MODULES.items() if folder_of(name) == folder]
    ours = {name for path in paths for name in imported_modules(path) if name in MODULES}
    return {name for name in ours if folder_of(name) != folder} - {"verl_ext"}


def test_every_folder_is_documented() -> None:
    folders = {path.parent.name for path in (ROOT / "verl_ext").glob("*/__init__.py")}
    assert set(ROWS) == folders | COMMAND_FOLDERS | EVALUATION


@pytest.mark.parametrize("folder", ROWS)
def test_folder_imports_match_documentation(folder: str) -> None:
    told = {
        name if name.startswith("eval_") else f"verl_ext.{name}" for name in re.findall(r"`(.+?)`", ROWS[folder][1])
    }
    found = imports_of(folder) - (BESIDE - WITH_TORCH)
    assert not {name for name in found if not any(is_in(name, each) for each in told)}, "not on the page"
    assert not {each for each in told if not any(is_in(name, each) for name in found)}, "on the page, and not imported"


def test_folder_imports_are_acyclic() -> None:
    graph = {folder: {folder_of(name) for name in imports_of(folder)} for folder in ROWS}
    assert {*TopologicalSorter(graph).static_order()} >= ROWS.keys()


def test_no_module_imports_a_command() -> None:
    for name, path in MODULES.items():
        commands = {each for each in COMMANDS if any(is_in(found, each) for found in imported_modules(path))}
        assert commands <= {folder_of(name)}, name


def test_top_level_modules_import_only_each_other() -> None:
    assert WITH_TORCH < BESIDE
    for name in BESIDE:
        assert imported_modules(MODULES[name]) & MODULES.keys() <= BESIDE, name


def test_module_imports_are_acyclic() -> None:
    graph = {name: imported_modules(path) & MODULES.keys() for name, path in MODULES.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


@pytest.mark.parametrize("package", ["eval_pipeline.judge", "eval_pipeline.problems"])
def test_module_imports_of_judge_and_problems_are_acyclic(package: str) -> None:
    ours = {name: path for name, path in MODULES.items() if is_in(name, package) and name != package}
    graph = {name: imported_modules(path) & ours.keys() for name, path in ours.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(ours)


INSIDE = ROOT / "eval_pipeline/judge/inside"
SIBLINGS = {path.stem for path in INSIDE.glob("*.py")}
assert "tester" in SIBLINGS, "the tests below would check nothing"


def test_sandbox_modules_import_nothing_of_the_product() -> None:
    for path in INSIDE.glob("*.py"):
        found = {name.partition(".")[0] for name in imported_modules(path)}
        assert found <= sys.stdlib_module_names | SIBLINGS | {"numpy", "sandlock"}, path


def test_shared_sandbox_modules_import_no_other_sandbox_module() -> None:
    """The other modules are found by plain names, and only in a sandbox."""
    outside = [path for path in MODULES.values() if path.parent == INSIDE.parent]
    package = "eval_pipeline.judge.inside."
    shared = {name.removeprefix(package) for path in outside for name in imported_modules(path) if package in name}
    assert shared == {"protocol", "usage"}
    for name in shared:
        assert not imported_modules(INSIDE / f"{name}.py") & SIBLINGS, name


def test_judge_server_unpickles_no_sandbox_output() -> None:
    paths = [*INSIDE.parent.glob("*.py")]
    assert paths
    for path in paths:
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
        assert "pickle" not in imported_modules(path) and "marshal.loads" not in calls, path


def test_only_lmms_eval_model_class_imports_lmms_eval() -> None:
    users = [
        path for path in MODULES.values() if any(name.split(".")[0] == "lmms_eval" for name in imported_modules(path))
    ]
    assert users == [ROOT / "eval_pipeline/lmms/models/budget_controller.py"]


SLOW_IMPORTS = {"torch", "ray", "transformers", "verl", "vllm"}
"""Packages that take seconds to import. A suite of slow tests is collected without them."""


@cache
def parsed_tests() -> dict[Path, ast.Module]:
    """Every file of the tests, parsed."""
    return {path: ast.parse(path.read_text()) for path in sorted((ROOT / "tests").rglob("*.py"))}


def outside_helpers() -> dict[Path, ast.Module]:
    """Test files without helpers and without programs that tests start."""
    return {
        path: tree for path, tree in parsed_tests().items() if path.parent.name not in ("helpers", "ranks", "faults")
    }


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]


def names_of(node: ast.AST) -> set[str]:
    """The modules that an import statement names; for `from a import b` also `a.b`, which may be a module."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return set()


def at_import(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported, without the bodies of functions and classes."""
    for node in nodes:
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        for name in ("body", "handlers", "orelse", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from at_import(getattr(node, name, []))


def starts_a_training(node: ast.AST) -> bool:
    """Whether a node is a training command: a list of words with `bash` and one of the two scripts."""
    if not isinstance(node, ast.List | ast.Tuple):
        return False
    texts = [part.value for each in node.elts for part in ast.walk(each) if isinstance(part, ast.Constant)]
    words = [text for text in texts if isinstance(text, str)]
    return "bash" in words and any(word.endswith(("run_sft.sh", "run_grpo.sh")) for word in words)


def test_no_test_module_is_imported() -> None:
    found = [
        f"{place(path, node)} {name}"
        for path, tree in parsed_tests().items()
        for node in ast.walk(tree)
        for name in names_of(node)
        if re.fullmatch(r"tests\.\w+\.test_\w+", name)
    ]
    assert found == []


def test_only_helpers_sleep() -> None:
    found = []
    for path, tree in outside_helpers().items():
        for node in ast.walk(tree):
            if "time.sleep" in names_of(node):
                found.append(place(path, node))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep"):
                found.append(place(path, node))
    assert found == []


def test_only_helpers_start_trainings() -> None:
    trees = outside_helpers().items()
    found = [place(path, node) for path, tree in trees for node in ast.walk(tree) if starts_a_training(node)]
    assert found == []


def test_slow_suites_collect_without_slow_imports() -> None:
    found = set()
    for path, tree in outside_helpers().items():
        if path.parent.name in ("integration", "campaigns") or path.name == "conftest.py":
            for node in at_import(tree.body):
                found |= {place(path, node) for name in names_of(node) if name.split(".")[0] in SLOW_IMPORTS}
    assert sorted(found) == []
