"""Finds recipes: `recipes/<stage>/<name>.yaml`, or any YAML file. Standard library only, so that --help is fast."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from verl_ext.errors import UserError
from verl_ext.paths import RECIPES, caller_directory


def find_recipe(stage: str, name: str | None, key: str = "recipe") -> Path:
    """Find the path of a recipe.

    Args:
        stage: folder in `recipes/`.
        name: a recipe's name, a path to a YAML file, or None for the stage's default.
        key: the setting that names the recipe, for messages.

    Raises:
        UserError: the recipe does not exist; the message lists the available ones.
    """
    name = name or default_recipe(stage)
    path = Path(name).expanduser() if name.endswith((".yaml", ".yml")) else RECIPES / stage / f"{name}.yaml"
    if not path.is_absolute():  # the scripts change to the repository; also search the caller's directory
        path = path if path.is_file() else caller_directory() / path
    if not path.is_file():
        known = sorted(recipe_summaries(stage))
        guess = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {key}={guess[0]}?" if guess else f"use one of {', '.join(known)} or a path to a YAML file"
        raise UserError(f"there is no recipe '{name}' for the stage {stage}; {hint}")
    return path


def default_recipe(stage: str) -> str:
    """The stage's default recipe: from `recipe_variable`, else from the `stage: name` lines of `recipes/default.yaml`.

    Raises:
        UserError: there is neither.
    """
    if name := os.environ.get(recipe_variable(stage)):
        return name
    path = RECIPES / "default.yaml"
    found = re.search(rf"^{re.escape(stage)}:\s*([^\s#]+)", path.read_text() if path.is_file() else "", re.MULTILINE)
    if not found:
        raise UserError(f"{path} names no recipe for the stage {stage}; add a line '{stage}: NAME' or set recipe=NAME")
    return found.group(1)


def recipe_variable(stage: str) -> str:
    """The environment variable that sets the stage's default recipe, such as `VERL_EXT_SFT_RECIPE`."""
    return f"VERL_EXT_{stage.upper()}_RECIPE"


def recipe_summaries(stage: str) -> dict[str, str]:
    """One-line descriptions (first comment lines of the files) of a stage's recipes, by name."""
    paths = sorted((RECIPES / stage).glob("*.yaml"))
    return {path.stem: path.read_text().partition("\n")[0].lstrip("# ") for path in paths}
