"""Folders import one way, so that a reader can start anywhere and only ever has to look to the right."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

BASE = {
    "verl_ext.cache",
    "verl_ext.errors",
    "verl_ext.command_line",
    "verl_ext.progress",
    "verl_ext.summary",
    "verl_ext.tell",
    "verl_ext.deadline",
    "verl_ext.collective",
    "verl_ext.native_output",
    "verl_ext.gpus",
    "verl_ext.quick_imports",
    "verl_ext.vllm_environment",
    "verl_ext.model_code",
    "verl_ext.own_code",
    "verl_ext.parent_death",
    "verl_ext.config",
}
ALLOWED = {
    "verl_ext.config": {"verl_ext.errors", "verl_ext.deadline", "verl_ext.gpus", "verl_ext.health.limits"},
    "verl_ext.health": {
        "verl_ext.errors",
        "verl_ext.tell",
        "verl_ext.command_line",
        "verl_ext.own_code",
        "verl_ext.metrics",
        "verl_ext.checkpoint.layout",
    },
    "verl_ext.monitor": {
        "verl_ext.cache",
        "verl_ext.errors",
        "verl_ext.command_line",
        "verl_ext.progress",
        "verl_ext.summary",
        "verl_ext.tell",
        "verl_ext.metrics",
        "verl_ext.health",
        "verl_ext.checkpoint.layout",
        "verl_ext.checkpoint.lease",
    },
    "verl_ext.metrics": {"verl_ext.errors", "verl_ext.tell", "verl_ext.command_line", "verl_ext.progress"},
    "verl_ext.plan": {
        "verl_ext.errors",
        "verl_ext.tell",
        "verl_ext.model_code",
        "verl_ext.command_line",
        "verl_ext.config",
    },
    "verl_ext.reference": {
        "verl_ext.command_line",
        "verl_ext.tell",
        "verl_ext.config",
        "verl_ext.health.limits",
        "verl_ext.launch",
        "eval_pipeline.recipe",
    },
    "verl_ext.data": BASE | {"eval_pipeline.problems"},
    "verl_ext.checkpoint": BASE | {"verl_ext.metrics"},
    "verl_ext.grpo": BASE
    | {
        "verl_ext.metrics",
        "verl_ext.checkpoint.weights",
        "verl_ext.checkpoint.shards",
        "verl_ext.checkpoint.export",
        "eval_pipeline.judge",
        "eval_pipeline.problems",
    },
    "verl_ext.controller": BASE
    | {
        "verl_ext.data.end_tokens",
        "verl_ext.data.questions",
        "verl_ext.data.question_sources",
        "verl_ext.grpo.environment",
        "verl_ext.grpo.policy",
        "verl_ext.grpo.seeds",
    },
    "verl_ext.trainer": BASE
    | {
        "verl_ext.metrics",
        "verl_ext.health",
        "verl_ext.data",
        "verl_ext.checkpoint",
        "verl_ext.grpo",
        "verl_ext.controller",
    },
    "verl_ext.launch": BASE
    | {
        "verl_ext.metrics",
        "verl_ext.health.rules",
        "verl_ext.health.own_rules",
        "verl_ext.health.series",
        "verl_ext.data",
        "verl_ext.checkpoint",
        "verl_ext.grpo.rewards.registry",
    },
    "eval_pipeline": {
        "verl_ext.errors",
        "verl_ext.command_line",
        "verl_ext.progress",
        "verl_ext.summary",
        "verl_ext.native_output",
        "verl_ext.gpus",
        "verl_ext.quick_imports",
        "verl_ext.starting",
        "verl_ext.vllm_environment",
        "verl_ext.tell",
        "verl_ext.own_code",
        "verl_ext.metrics",
        "verl_ext.checkpoint.lease",
        "verl_ext.checkpoint.layout",
        "verl_ext.checkpoint.verify",
        "verl_ext.controller",
        "verl_ext.data.questions",
        "verl_ext.data.question_sources",
        "verl_ext.model_code",
        "verl_ext.config.overrides",
        "verl_ext.config.plain",
        "verl_ext.config.recipes",
        "verl_ext.config.secrets",
        "verl_ext.config.written",
    },
}


def imported_modules(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return names | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    paths = list((ROOT / folder.replace(".", "/")).rglob("*.py"))
    assert paths
    for path in paths:
        ours = {name for name in imported_modules(path) if name.startswith(("verl_ext", "eval_pipeline"))}
        strangers = {
            name for name in ours if not any(name.startswith(allowed) for allowed in ALLOWED[folder] | {folder})
        }
        assert not strangers, f"{path.relative_to(ROOT)} imports {sorted(strangers)}"


def test_only_the_model_class_for_lmms_eval_imports_it() -> None:
    paths = (path for folder in ("verl_ext", "eval_pipeline") for path in (ROOT / folder).rglob("*.py"))
    users = [path for path in paths if any(name.split(".")[0] == "lmms_eval" for name in imported_modules(path))]
    assert users == [ROOT / "eval_pipeline/lmms/models/budget_controller.py"]
