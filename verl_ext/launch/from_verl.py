"""A command line that was typed for verl's own trainer: verl's defaults, and paths from where it was typed."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_ext.checkpoint.layout import list_steps
from verl_ext.checkpoint.stock import is_stock
from verl_ext.config.schema import set_at, value_at
from verl_ext.console import print_line
from verl_ext.data.config import file_list
from verl_ext.errors import UserError
from verl_ext.metrics.run_record import RunRecord
from verl_ext.paths import caller_directory
from verl_ext.trainer.stages import RunConfig, load_config

RECIPE = "verl"
PATHS = (
    "data.train_files", "data.val_files", "data.custom_cls.path", "model.partial_pretrain", "model.lora_adapter_path",
    "trainer.default_local_dir", "trainer.resume_from_path",
)  # fmt: skip


def compose_as_typed(stage: str, overrides: list[str]) -> RunConfig:
    """The configuration; without `recipe=` it is of the recipe `verl` where verl itself began the run.

    Else the default recipe would set what the same command left to verl's defaults.

    Raises:
        UserError: see `load_config`.
    """
    names_recipe = any(word.startswith("recipe=") for word in overrides)
    if stage == "sft" and overrides and not names_recipe:
        config = with_paths_of_caller(load_config(stage, [f"recipe={RECIPE}", *overrides]))
        if was_begun_by_verl(config):
            run_dir = config.trainer.default_local_dir
            print_line(
                f"No recipe= is given and verl itself began {run_dir}: using recipe={RECIPE}, verl's defaults.",
                sys.stderr,
            )
            return config
    config = load_config(stage, overrides)
    return with_paths_of_caller(config) if names_recipe and config.recipe == RECIPE else config


def was_begun_by_verl(config: RunConfig) -> bool:
    """Whether the run goes on from a checkpoint that verl wrote, or once did."""
    run_dir, named = Path(config.trainer.default_local_dir), config.trainer.resume_from_path
    with suppress(UserError):  # there is no record yet, or a damaged one
        if RunRecord(run_dir).read()["recipe"] == RECIPE:
            return True
    return any(is_stock(path) for path in [*list_steps(run_dir), *([Path(named)] if named else [])])


def with_paths_of_caller(config: RunConfig) -> RunConfig:
    """The same with relative paths from where the command was typed; the scripts change to the repository."""
    caller = caller_directory()
    for key in PATHS:
        value = value_at(config, key)
        if value is not None:
            paths = [from_caller(caller, key, path) for path in file_list(value)]
            set_at(config, key, paths[0] if isinstance(value, str) else paths)
    return config


def from_caller(caller: Path, key: str, path: Any) -> Any:
    """One of them; what may be the name of a model on the hub is a path only if it is there."""
    if not isinstance(path, str) or "://" in path or path.startswith(("/", "~")):
        return path
    here = caller / path
    return path if key == "model.partial_pretrain" and not here.is_dir() else str(here)
