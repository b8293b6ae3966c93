"""Finds recipes: `recipes/<stage>/<name>.yaml`, or any YAML file. Standard library only, so that --help is instant."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from verl_ext.errors import UserError
from verl_ext.paths import RECIPES, caller_directory


def find_recipe(stage: str, name: str | None, key: str = "recipe") -> Path:
    """Path of a recipe.

    Args:
        stage: folder below `recipes/`.
        name: a recipe's name, a path to a YAML file, or None for the stage's default.
        key: the setting that names it, for messages.

    Raises:
        UserError: no such recipe; the message lists those there are.
    """
    name = name or default_recipe(stage)
    path = Path(name).expanduser() if name.endswith((".yaml", ".yml")) else RECIPES / stage / f"{name}.yaml"
    if not path.is_absolute():  # the scripts change to the repository; a recipe is looked for where the user stood too
        path = path if path.is_file() else caller_directory() / path
    if not path.is_file():
        known = sorted(recipe_summaries(stage))
        guess = difflib.get_close_matches(name, known, n=1)
        hint = (
            f"did you mean {key}={guess[0]}?" if guess else f"take one of {', '.join(known)} or a path to a YAML file"
        )
        raise UserError(f"there is no recipe '{name}' for the stage {stage}; {hint}")
    return path


def default_recipe(stage: str) -> str:
    """The recipe that `recipes/default.yaml` names for the stage; the file holds plain `stage: name` lines."""
    path = RECIPES / "default.yaml"
    found = re.search(rf"^{re.escape(stage)}:\s*([^\s#]+)", path.read_text() if path.is_file() else "", re.MULTILINE)
    if not found:
        raise UserError(f"{path} names no recipe for the stage {stage}; add a line '{stage}: NAME' or give recipe=NAME")
    return found.group(1)


def recipe_summaries(stage: str) -> dict[str, str]:
    """Name to one-line description (the file's first comment line) of every recipe of a stage."""
    paths = sorted((RECIPES / stage).glob("*.yaml"))
    return {path.stem: path.read_text().partition("\n")[0].lstrip("# ") for path in paths}
