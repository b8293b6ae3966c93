"""Every name of verl that the product uses exists in the installed release; a missing one is reported with its user."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import verl
from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from tests.helpers import ROOT

FOLDERS = ("verl_ext", "eval_pipeline", "benchmarks")
OF_THE_TRAINER = {
    # overridden
    "__init__", "load_checkpoint", "save_checkpoint", "training_step", "validation_step", "fit",
    # called, under Ulysses only
    "_compute_loss_and_backward",
    # read, or set for `_compute_loss_and_backward`
    "config", "device_mesh", "device_name", "sharding_manager", "tokenizer", "ulysses_device_mesh",
}  # fmt: skip
UNUSED_OF_THE_TRAINER = {
    # what verl's constructor calls, which does not run
    "_normalize_config_bsz", "_build_dataloader", "_build_model_optimizer", "_init_checkpoint_manager",
    # what its `load_checkpoint` calls
    "_load_dataloader_state", "_determine_resume_path", "_find_latest_checkpoint",
}  # fmt: skip
OF_THE_MANAGER = {
    "__init__", "get_rng_state", "load_checkpoint", "load_rng_state", "lr_scheduler", "model", "optimizer",
    "processing_class", "rank", "save_checkpoint", "should_load_extra", "should_load_model", "should_load_optimizer",
    "should_save_extra", "should_save_hf_model", "should_save_model", "should_save_optimizer", "world_size",
}  # fmt: skip


def used_names() -> Iterator[tuple[str, str, str]]:
    """Module, name in it ("" for the module alone) and file of each use of verl; all kinds of import are found."""
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        tree, file = ast.parse(path.read_text()), str(path.relative_to(ROOT))
        aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and is_verls(node.module or ""):
                yield from ((node.module or "", alias.name, file) for alias in node.names)
            elif isinstance(node, ast.Import):
                aliases |= {alias.asname or alias.name: alias.name for alias in node.names if is_verls(alias.name)}
        yield from ((module, "", file) for module in aliases.values())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (module := aliases.get(ast.unparse(node.value))):
                yield module, node.attr, file


def is_verls(module: str) -> bool:
    return module.partition(".")[0] == "verl"


USES = sorted(set(used_names()))


def require(found: bool, what: str, file: str) -> None:
    assert found, f"verl {verl.__version__} has no {what}, which {file} uses"


@pytest.mark.parametrize(("module", "name", "file"), USES)
def test_verl_has_each_name(module: str, name: str, file: str) -> None:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        require(not is_verls(error.name or ""), error.name or module, file)
        raise
    require(not name or hasattr(found, name) or has_module(f"{module}.{name}"), f"{module}.{name}", file)


def has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_finds_every_kind_of_use() -> None:
    found = {(module, name) for module, name, _ in USES}
    assert ("verl.utils.fsdp_utils", "apply_fsdp2") in found
    assert ("verl.models.transformers.monkey_patch", "apply_monkey_patch") in found, "inside a function"
    assert ("verl.trainer.fsdp_sft_trainer", "create_sft_dataset") in found, "by the name of a module"


def test_only_verl_api_imports_verl() -> None:
    assert {file for _, _, file in USES if not file.startswith("benchmarks")} == {"verl_ext/verl_api.py"}


def test_importing_verl_modules_prints_nothing() -> None:
    modules = sorted({module for module, _, file in USES if not file.startswith("benchmarks")})
    code = "\n".join(f"import {module}" for module in ("verl_ext", *modules))
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def names_of(cls: type) -> set[str]:
    """Methods of a verl class and its bases, and attributes that their constructors set."""
    bases = [base for base in cls.__mro__ if is_verls(base.__module__)]
    methods = {name for base in bases for name in vars(base)}
    return methods | {name for base in bases for name in attributes(tree_of(base.__init__), ast.Store)}


def tree_of(function: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def attributes(node: ast.AST, context: type) -> set[str]:
    """Attributes of `self` that are written, or read."""
    found = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, context))
    return {each.attr for each in found if isinstance(each.value, ast.Name) and each.value.id == "self"}


def names_in(folder: str, base: str) -> set[str]:
    """Methods of our subclasses of a verl class, and the attributes of `self` that they read."""
    nodes = [node for path in (ROOT / folder).glob("*.py") for node in ast.parse(path.read_text()).body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    derived: set[str] = set()
    while added := {
        name
        for name, node in classes.items()
        if name not in derived and {base, *derived} & {ast.unparse(each) for each in node.bases}
    }:
        derived |= added
    ours = [classes[name] for name in derived]
    methods = {each.name for node in ours for each in node.body if isinstance(each, ast.FunctionDef)}
    return methods.union(*(attributes(node, ast.Load) for node in ours))


@pytest.mark.parametrize(
    ("cls", "listed", "folder"),
    [
        (FSDPSFTTrainer, OF_THE_TRAINER, "verl_ext/trainer"),
        (FSDPCheckpointManager, OF_THE_MANAGER, "verl_ext/checkpoint"),
    ],
)
def test_verl_classes_have_overridden_and_read_names(cls: type, listed: set[str], folder: str) -> None:
    for name in sorted(listed - names_of(cls)):
        require(False, f"{cls.__name__}.{name}", folder)
    assert names_in(folder, cls.__name__) & names_of(cls) == listed, "the list above is not what the code uses"


def test_each_verl_trainer_method_is_accounted_for() -> None:
    methods = {name for name, value in vars(FSDPSFTTrainer).items() if callable(value)}
    assert methods == (OF_THE_TRAINER & methods) | UNUSED_OF_THE_TRAINER
    assert not UNUSED_OF_THE_TRAINER & names_in("verl_ext/trainer", "FSDPSFTTrainer")
