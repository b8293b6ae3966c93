"""Which recipe a command takes: the one that is named, else the training run's, else the default."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from eval_pipeline.config import TIERS, EvalConfig, TiersConfig
from eval_pipeline.models.run_config import read_run_config
from eval_pipeline.recipe.load import load_recipe
from verl_ext.errors import UserError


def choose_recipe(arguments: argparse.Namespace, run_dir: Path | None) -> EvalConfig:
    """The recipe with the command line's changes.

    Args:
        arguments: `recipe`, `overrides` and `no_wandb` of `command.arguments.add_recipe`.
        run_dir: of the training run, whose `eval.recipe` counts where none is named; None for other models.

    Raises:
        UserError: an unknown recipe or key, or a value that cannot work.
    """
    recipe = load_recipe(arguments.recipe or recipe_of(run_dir), arguments.overrides)
    return replace(recipe, wandb=False) if arguments.no_wandb else recipe


def recipe_of(run_dir: Path | None) -> str | None:
    """The name of the recipe that a run asks for; None where it asks for none.

    Raises:
        UserError: it asks for a file. A recipe decides where keys are sent and what code is run, and a run's directory
            may be somebody else's, with a recipe in it.
    """
    name = read_run_config(run_dir).recipe
    if name is not None and (name.endswith((".yaml", ".yml")) or not re.fullmatch(r"[\w.-]+", name)):
        raise UserError(f"the run's config.yaml names the recipe file {name}; if you trust it, add --recipe {name}")
    return name


def restricted_to(datasets: Collection[str], recipe: EvalConfig) -> EvalConfig:
    """The recipe whose tiers name these data sets alone.

    Args:
        datasets: names, of which the recipe may lack some.
        recipe: to restrict.

    Raises:
        UserError: the recipe's tiers name none of them.
    """
    tier1, tier2, tier3 = ([name for name in recipe.tiers.of(tier) if name in datasets] for tier in TIERS)
    tiers = TiersConfig(tier1=tier1, tier2=tier2, tier3=tier3)
    if not tiers.names:
        raise UserError(
            f"the recipe's tiers name none of the evaluated data sets ({', '.join(sorted(datasets))}); name the recipe "
            "of that evaluation with --recipe"
        )
    return replace(recipe, tiers=tiers)
