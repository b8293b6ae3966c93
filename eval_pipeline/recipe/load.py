"""Reads an evaluation recipe: `recipes/eval/<name>.yaml` over the defaults, then `key=value` overrides."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from eval_pipeline.recipe.kinds import NULLABLE
from eval_pipeline.recipe.schema import EvalRecipe
from verl_ext.config.overrides import apply_overrides, leaves, merge_known
from verl_ext.config.plain import as_dict
from verl_ext.config.recipes import find_recipe
from verl_ext.config.secrets import require_no_secrets
from verl_ext.errors import UserError, first_line_of
from verl_ext.yaml_text import yaml_text

DEFAULTS = Path(__file__).with_name("defaults.yaml")


def load_recipe(name: str | None, overrides: Sequence[str] = ()) -> EvalRecipe:
    """Read and check a recipe.

    Args:
        name: a name in `recipes/eval/`, a path to a YAML file, or None for the one that `recipes/default.yaml` names.
        overrides: `key=value`, as for a training.

    Raises:
        UserError: an unknown recipe or key, a value that cannot work, or a secret.
    """
    try:
        config = as_dict(compose_recipe(name, overrides))
    except OmegaConfBaseException as error:
        raise UserError(f"cannot resolve the recipe ({first_line_of(error)}); write the value itself") from error
    require_no_secrets(config)
    return EvalRecipe.of(config)


def compose_recipe(name: str | None, overrides: Sequence[str] = ()) -> DictConfig:
    """The resolved configuration; the arguments are those of `load_recipe`."""
    config = _defaults()
    path = find_recipe("eval", name)
    try:
        recipe = OmegaConf.load(StringIO(yaml_text(path)))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise UserError(f"cannot read the recipe {path} ({first_line_of(error)}); correct the file") from error
    if not isinstance(recipe, DictConfig):
        raise UserError(f"the recipe {path} is not a YAML mapping; write `key: value` lines")
    merge_known(config, recipe, str(path), NULLABLE)
    apply_overrides(config, list(overrides), NULLABLE)
    added = leaves(config).keys() - leaves(_defaults()).keys()
    if added:  # by +key=value, which makes sense only where something reads the key
        raise UserError(f"an evaluation recipe has no key {min(added)!r}; remove it")
    return config


def known_keys() -> list[str]:
    """The keys that every recipe has."""
    return list(leaves(_defaults()))


def _defaults() -> DictConfig:
    config = OmegaConf.load(DEFAULTS)
    assert isinstance(config, DictConfig)
    return config
