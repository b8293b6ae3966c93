"""`check`: whether an evaluation could start; a training asks before it starts one beside it."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from eval_pipeline.command.arguments import RECIPE_EXAMPLE, add_action, add_overrides
from verl_ext.cli import Commands
from verl_ext.console import print_line

if TYPE_CHECKING:
    from eval_pipeline.config import EvalConfig

TEXT = "Check a recipe without evaluating anything. Reads the problems of its local data sets and tests the sandbox."


def register(commands: Commands) -> None:
    """Add the command."""
    parser = add_action(commands, "check", TEXT, run, examples=["--recipe humaneval"], notes=RECIPE_EXAMPLE)
    parser.add_argument("--watch", action="store_true", help="also check that `watch` can use the recipe")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--recipe", metavar="NAME", help="recipe to check (default: quickstart)")
    add_overrides(parser)


def run(arguments: argparse.Namespace) -> int:
    """Say what would be evaluated."""
    from eval_pipeline.executors.executor import require_engine
    from eval_pipeline.recipe.load import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    require_engine(recipe)
    if arguments.watch:
        recipe.engine.require_own_model("watch")
    found = {
        "problems": _count_problems(recipe),
        "isolation": _probe_sandbox(recipe),
        "gpus": _count_gpus(recipe),
    }
    print_line(json.dumps(found) if arguments.json else _in_words(found))
    return 0


def _count_problems(recipe: EvalConfig) -> dict[str, int | None]:
    """Of each data set that the tiers name; None where they come from the hub."""
    from eval_pipeline.config import TIERS
    from eval_pipeline.problems.dataset import load_problems
    from eval_pipeline.problems.source import is_local
    from verl_ext.errors import UserError

    sources = [recipe.sources[name] for name, _ in recipe.datasets_up_to(max(TIERS))]
    if not sources:
        raise UserError("the recipe's tiers name no data set, so there is nothing to evaluate; set tiers.tier1")
    return {source.name: len(load_problems(source)) if is_local(source) else None for source in sources}


def _probe_sandbox(recipe: EvalConfig) -> str | None:
    """The level that would be used; None where other machines judge."""
    from eval_pipeline.judge import JudgeClient

    if recipe.executor.kind != "local":
        return None
    with JudgeClient(replace(recipe.judge, num_workers=1)) as judge:
        return judge.isolation


def _count_gpus(recipe: EvalConfig) -> int:
    """How many GPUs of this machine the engines would take; those of a Ray cluster are its own affair."""
    from eval_pipeline.executors.gpus import gpus_for_workers

    if recipe.executor.kind == "ray" and recipe.executor.address != "local":
        return 0
    groups = gpus_for_workers(recipe.executor.num_workers, recipe.engine)
    return sum(len(group.split(",")) for group in groups if group is not None)


def _in_words(found: dict) -> str:
    counts = (f"{name} ({'from the hub' if count is None else count})" for name, count in found["problems"].items())
    sandbox = "answers judged on the Ray cluster" if found["isolation"] is None else f"isolation {found['isolation']}"
    return f"The recipe is valid: problems of {', '.join(counts)}; {sandbox}; {found['gpus']} GPUs of this machine"
