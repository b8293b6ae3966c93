"""Which parts of verl's FSDPSFTTrainer and checkpoint manager this project overrides, uses and leaves unused."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.helpers import ROOT
from verl_ext.config.compose import verl_directory

OVERRIDDEN = {
    "__init__": {"PipelineTrainer", "GRPOTrainer"},
    "_normalize_config_bsz": {"TrainerSetup"},
    "_build_dataloader": {"TrainerSetup"},
    "_build_model_optimizer": {
        "TrainerSetup", "SFTSetup", "VLMSFTTrainer", "GRPOTrainer", "BudgetControllerTrainer",
    },
    "training_step": {"PipelineTrainer", "SFTTrainer", "GRPOTrainer", "BudgetControllerTrainer"},
    "save_checkpoint": {"TrainerSetup"},
    "_init_checkpoint_manager": {"TrainerSetup"},
    "load_checkpoint": {"TrainerSetup"},
    "fit": {"PipelineTrainer", "GRPOTrainer"},
}  # fmt: skip
CALLED = {"_compute_loss_and_backward"}  # under Ulysses only
UNUSED = {
    "validation_step", "_load_dataloader_state", "_determine_resume_path", "_find_latest_checkpoint",
}  # fmt: skip
ATTRIBUTES = {
    "config", "device_mesh", "device_name", "resume_global_step", "sharding_manager", "tokenizer",
    "ulysses_device_mesh",
}  # fmt: skip
"""What the constructor sets and our trainers read."""
OF_THE_MANAGER = {
    "__init__", "checkpoint_save_contents", "get_rng_state", "load_checkpoint", "load_rng_state", "lr_scheduler",
    "model", "optimizer", "processing_class", "rank", "save_checkpoint", "should_load_extra", "should_load_model",
    "should_load_optimizer", "should_save_extra", "should_save_model", "should_save_optimizer", "world_size",
}  # fmt: skip


def class_of(path: Path, name: str) -> ast.ClassDef:
    nodes = ast.parse(path.read_text()).body
    return next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name)


def methods_of(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


def attributes(node: ast.AST, context: type) -> set[str]:
    """Names of `self.NAME` that are written, or read."""
    found = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, context))
    return {each.attr for each in found if isinstance(each.value, ast.Name) and each.value.id == "self"}


STOCK = methods_of(class_of(verl_directory() / "trainer/fsdp_sft_trainer.py", "FSDPSFTTrainer"))


def our_trainers() -> dict[str, ast.ClassDef]:
    """The classes of `verl_ext/trainer` that define one of verl's methods or derive from such a class, by name."""
    nodes = [node for path in (ROOT / "verl_ext/trainer").glob("*.py") for node in ast.parse(path.read_text()).body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    found: dict[str, ast.ClassDef] = {}
    derived = {"FSDPSFTTrainer"}
    while added := {
        name: node
        for name, node in classes.items()
        if name not in found and derived & {ast.unparse(base) for base in node.bases}
    }:
        found |= added
        derived |= added.keys()
    return found


def test_every_method_of_verls_trainer_is_overridden_called_or_known_to_be_unused() -> None:
    assert OVERRIDDEN.keys() | CALLED | UNUSED == STOCK.keys()
    trainers = our_trainers()
    assert {
        name: {ours for ours, node in trainers.items() if name in methods_of(node)} for name in OVERRIDDEN
    } == OVERRIDDEN
    ours = {name for node in trainers.values() for name in methods_of(node)}
    assert ours & STOCK.keys() == OVERRIDDEN.keys()
    read = set().union(*(attributes(node, ast.Load) for node in trainers.values()))
    assert (read & STOCK.keys()) - ours == CALLED
    assert read & attributes(STOCK["__init__"], ast.Store) == ATTRIBUTES


def test_what_is_used_of_verls_checkpoint_manager() -> None:
    folder = verl_directory() / "utils/checkpoint"
    managers = [
        class_of(folder / "fsdp_checkpoint_manager.py", "FSDPCheckpointManager"),
        class_of(folder / "checkpoint_manager.py", "BaseCheckpointManager"),
    ]
    verls = {name for node in managers for name in methods_of(node)}
    verls |= {name for node in managers for name in attributes(methods_of(node)["__init__"], ast.Store)}
    ours = class_of(ROOT / "verl_ext/checkpoint/manager.py", "CheckpointManager")
    assert (attributes(ours, ast.Load) | set(methods_of(ours))) & verls == OF_THE_MANAGER
