"""The page on a verl without FSDPSFTTrainer names what the two sources have, and leaves nothing out."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.helpers import ROOT
from verl_ext.config.compose import base_config, verl_directory
from verl_ext.config.overrides import leaves

PAGE = (ROOT / "docs/after_fsdp_sft_trainer.md").read_text()
STOCK = "trainer/fsdp_sft_trainer.py"
ENGINE = (
    "trainer/sft_trainer.py", "workers/engine_workers.py", "workers/engine/base.py", "workers/engine/utils.py",
    "workers/engine/fsdp/transformer_impl.py", "workers/utils/losses.py", "workers/config/model.py",
    "utils/checkpoint/checkpoint_handler.py",
)  # fmt: skip
OURS = ("TrainerSetup", "PipelineTrainer", "SFTSetup", "SFTTrainer", "VLMSFTTrainer", "GRPOTrainer")
OURS += ("BudgetControllerTrainer",)


def rows_of(heading: str) -> list[list[list[str]]]:
    """The first table below a line: by row and column the names in code font."""
    lines = PAGE.split(heading, 1)[1].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| --- "))
    table = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        table.append([re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")])
    return table


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def class_of(path: Path, name: str) -> ast.ClassDef:
    return next(node for node in tree(path).body if isinstance(node, ast.ClassDef) and node.name == name)


def methods_of(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


def attributes(node: ast.AST, context: type) -> set[str]:
    """Names of `self.NAME` that are written, or read."""
    found = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, context))
    return {each.attr for each in found if isinstance(each.value, ast.Name) and each.value.id == "self"}


def our_trainers() -> dict[str, ast.ClassDef]:
    """By name the classes that derive from verl's."""
    nodes = [node for path in (ROOT / "verl_ext/trainer").glob("*.py") for node in tree(path).body]
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef) and node.name in OURS}


@cache
def names_in_engine() -> set[str]:
    """`function` and `Class.method` of the engine trainer."""
    names = set()
    for path in ENGINE:
        for node in tree(verl_directory() / path).body:
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{name}" for name in methods_of(node)}
    return names


def test_every_method_is_told_with_who_overrides_it() -> None:
    stock = methods_of(class_of(verl_directory() / STOCK, "FSDPSFTTrainer"))
    assert set(our_trainers()) == set(OURS)
    overrides = {name: {ours for ours, node in our_trainers().items() if name in methods_of(node)} for name in stock}
    told = {row[0][0]: set(row[1]) for row in rows_of("## Methods of FSDPSFTTrainer")}
    assert told == overrides
    for row in rows_of("## Methods of FSDPSFTTrainer"):
        assert set(row[2]) <= names_in_engine(), row[0]


def test_a_method_that_is_called_is_told_to_be() -> None:
    stock = methods_of(class_of(verl_directory() / STOCK, "FSDPSFTTrainer"))
    called = {name for node in our_trainers().values() for name in attributes(node, ast.Load) & stock.keys()}
    ours = {name for node in our_trainers().values() for name in methods_of(node)}
    assert called - ours == {"_compute_loss_and_backward"}
    assert "| `_compute_loss_and_backward` | called, under Ulysses alone |" in PAGE


def test_every_attribute_that_is_read_is_told() -> None:
    constructor = methods_of(class_of(verl_directory() / STOCK, "FSDPSFTTrainer"))["__init__"]
    read = set().union(*(attributes(node, ast.Load) for node in our_trainers().values()))
    rows = rows_of("Of what the constructor sets")
    assert {row[0][0] for row in rows} == attributes(constructor, ast.Store) & read
    engine = "\n".join((verl_directory() / path).read_text() for path in ENGINE)
    for row in rows:
        assert f"self.{row[1][1]}" in engine


def test_what_is_used_of_the_checkpoint_manager_is_told() -> None:
    folder = verl_directory() / "utils/checkpoint"
    managers = [
        class_of(folder / "fsdp_checkpoint_manager.py", "FSDPCheckpointManager"),
        class_of(folder / "checkpoint_manager.py", "BaseCheckpointManager"),
    ]
    verls = {name for node in managers for name in methods_of(node)}
    verls |= {name for node in managers for name in attributes(methods_of(node)["__init__"], ast.Store)}
    ours = class_of(ROOT / "verl_ext/checkpoint/manager.py", "CheckpointManager")
    used = (attributes(ours, ast.Load) | set(methods_of(ours))) & verls
    assert {name for row in rows_of("## The checkpoint manager") for name in row[0]} == used


def test_every_import_of_verl_is_told() -> None:
    imported = defaultdict(set)
    for folder in ("verl_ext", "eval_pipeline"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verl":
                    imported[node.module] |= {alias.name for alias in node.names}
    told = defaultdict(set)
    words = {name for path in ENGINE for name in re.findall(r"\w+", (verl_directory() / path).read_text())}
    for line, row in zip(table_lines("## Functions"), rows_of("## Functions"), strict=True):
        told[row[0][0]] |= set(row[1])
        assert (line.split("|")[3].strip() == "yes") == (set(row[1]) <= words), line
    assert told == imported


def table_lines(heading: str) -> list[str]:
    """The rows of the first table below a line, as they are."""
    lines = PAGE.split(heading, 1)[1].split("| --- ", 1)[1].splitlines()[1:]
    return [line for number, line in enumerate(lines) if all(each.startswith("|") for each in lines[: number + 1])]


def test_the_keys_are_those_of_the_two_files() -> None:
    sft, folder = base_config("sft"), verl_directory() / "trainer/config"
    parts = {"engine": "engine/fsdp", "model": "model/hf_model", "optim": "optim/fsdp"}
    engine: DictConfig = OmegaConf.load(folder / "sft_trainer_engine.yaml")
    for section, name in parts.items():
        engine[section] = OmegaConf.load(folder / f"{name}.yaml")
    for [old], [new] in rows_of("| key today "):
        assert old in leaves(sft) and new in leaves(engine), (old, new)
    assert not {"prompt_key", "response_key", "multiturn"} & engine.data.keys()


@pytest.mark.parametrize("path", ENGINE)
def test_the_engine_is_for_accelerators_alone(path: str) -> None:
    registered = re.findall(r"EngineRegistry\.register\(.*device=(\[.*\])\)", (verl_directory() / path).read_text())
    assert set(registered) <= {'["cuda", "npu"]'} and (registered or "transformer_impl" not in path)


def test_every_file_that_would_change_is_there() -> None:
    for row in rows_of("## What would change, and where"):
        assert row[0] and all((ROOT / name).is_file() for name in row[0])
