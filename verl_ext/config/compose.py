"""Builds a stage's configuration: verl's YAML, what the pipeline adds, the recipe, the command line; later wins."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import asdict
from io import StringIO
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.config.checks import WITHOUT_EFFECT
from verl_ext.config.overrides import apply_overrides, leaves, merge_known
from verl_ext.config.plain import as_dict
from verl_ext.config.recipes import RECIPES, find_recipe
from verl_ext.config.secrets import require_no_secrets
from verl_ext.errors import UserError
from verl_ext.health.limits import Limits
from verl_ext.yaml_text import yaml_text

VERL_CONFIG = "sft_trainer"
LAYERS = {stage: ("common", stage) for stage in ("sft", "grpo", "budget", "vlm_sft")}
"""The files beside this one that are merged over it for each stage, later over earlier."""
STAGES = {"sft": ("sft", "vlm_sft"), "grpo": ("grpo", "budget")}
"""Which stages the recipes of a command may be of; the first where a recipe does not say."""

HOME_PATHS = (
    "trainer.default_local_dir", "trainer.resume_from_path", "data.custom_cls.path", "model.lora_adapter_path",
)  # fmt: skip
"""Paths that libraries read too: `~` is expanded here. What reads the other paths expands it itself."""


def compose_config(command: str, overrides: list[str]) -> DictConfig:
    """Resolve `recipe=NAME key=value ...` to one configuration.

    Args:
        command: "sft" or "grpo"; the recipe says which of its stages it is of.
        overrides: Hydra overrides (`key=value`, `+key=value`, `~key`); `recipe=` names a recipe or a YAML file.

    Returns:
        The configuration with every interpolation resolved, in struct mode.

    Raises:
        UserError: unknown recipe, unknown key, a value of the wrong type, an interpolation without target, a secret,
            or a stage that the command does not have.
    """
    recipe, content, stage = chosen_recipe(command, overrides)
    config = base_config(stage)
    nullable = {key for key, default in leaves(config).items() if default is None} | {"data.val_files"}
    merge_known(config, content, str(recipe), nullable)
    apply_overrides(config, [text for text in overrides if not text.startswith("recipe=")], nullable)
    if config.stage != stage:
        raise UserError(f"stage={config.stage} is not for the command line; give a recipe of that stage")
    config.recipe = recipe.stem
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise UserError(f"the configuration cannot be resolved: {error}; correct that key in {recipe}") from error
    expand_home(config)
    require_no_secrets(as_dict(config, resolve=False))
    return config


def expand_home(config: DictConfig) -> None:
    """Replace `~` by the home directory in `HOME_PATHS`, in place.

    Raises:
        UserError: a path begins with `~NAME/`, and this machine has no user of that name.
    """
    for key, value in leaves(config).items():
        for text in value if isinstance(value, list) else [value]:
            is_path = isinstance(text, str) and text.startswith("~") and "{" not in text
            is_path = is_path and (text == "~" or "/" in text)
            if is_path and os.path.expanduser(text).startswith("~"):
                user, _, rest = text.partition("/")
                raise UserError(f"{key} is '{text}', but there is no user {user[1:]}; write ~/{rest} or the whole path")
            if is_path and key in HOME_PATHS:
                OmegaConf.update(config, key, os.path.expanduser(text))


def sft_recipe_of(run_dir: Path) -> Path | None:
    """The file in `recipes/sft/` whose project and experiment name a run directory, None if there is none."""
    for path in sorted((RECIPES / "sft").glob("*.yaml")):
        content = load_yaml(path)
        names = tuple(OmegaConf.select(content, f"trainer.{key}_name") for key in ("project", "experiment"))
        if run_dir.parts[-2:] == names:
            return path
    return None


def chosen_recipe(command: str, words: Iterable[str]) -> tuple[Path, DictConfig, str]:
    """The recipe that `recipe=` names, or the default one: its file, its content and its stage.

    Raises:
        UserError: there is no such recipe, or it is of a stage that the command does not have.
    """
    names = [text.removeprefix("recipe=") for text in words if text.startswith("recipe=")]
    recipe = find_recipe(command, names[-1] if names else None)
    content = load_yaml(recipe)
    stage = content.get("stage", STAGES[command][0])
    if stage not in STAGES[command]:
        raise UserError(f"{recipe} is of the stage '{stage}'; run_{command}.sh has {', '.join(STAGES[command])}")
    return recipe, content, stage


def known_keys(command: str, words: Iterable[str]) -> list[str]:
    """The keys that can be set and have an effect in the stage of the recipe that `words` name, for suggestions."""
    try:
        *_, stage = chosen_recipe(command, words)
    except UserError:  # a mistake of its own, which is not the one that a suggestion is wanted for
        stage = STAGES[command][0]
    return [key for key in leaves(base_config(stage)) if key not in WITHOUT_EFFECT]


def base_config(stage: str) -> DictConfig:
    """verl's own configuration of the stage with the pipeline's keys and defaults merged over it."""
    with initialize_config_dir(str(verl_directory() / "trainer" / "config"), version_base=None):
        config = compose(VERL_CONFIG)
    OmegaConf.set_struct(config, False)
    for name in LAYERS[stage]:
        config.merge_with(OmegaConf.load(Path(__file__).with_name(f"{name}.yaml")))
    config.merge_with({"health": {"limits": asdict(Limits())}})
    OmegaConf.set_struct(config, True)
    return config


def verl_directory() -> Path:
    """Where verl is installed, found without importing it (its import takes seconds)."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("verl is not installed in this Python; unset VERL_EXT_PYTHON, or install verl==0.7.0 there")
    return Path(spec.submodule_search_locations[0])


def load_yaml(path: Path) -> DictConfig:
    """Read a recipe; what is not a YAML mapping is a `UserError`."""
    try:
        content = OmegaConf.load(StringIO(yaml_text(path)))
    except Exception as error:  # PyYAML and OmegaConf each have their own hierarchy for a malformed file
        raise UserError(f"{path} is not valid YAML ({' '.join(str(error).split())}); correct it") from error
    if not isinstance(content, DictConfig):
        raise UserError(f"{path} must hold a YAML mapping of configuration keys")
    return content
