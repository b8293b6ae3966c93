"""The few settings that an evaluation takes from the training run it judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.config.run_config import read_config_file
from verl_ext.errors import UserError

DEFAULT_PROJECT = "eval_pipeline"


@dataclass(frozen=True)
class RunSettings:
    """Settings of the training run; the defaults serve a model that no run saved."""

    recipe: str | None = None
    """`eval.recipe`: the recipe that its checkpoints are evaluated by."""
    project: str = DEFAULT_PROJECT
    """`trainer.project_name`: the W&B project that the metrics go to."""
    experiment: str | None = None
    """`trainer.experiment_name`: groups the evaluations of one run in W&B."""
    base: str | None = None
    """`model.partial_pretrain`: the initial model."""


def read_run_config(run_dir: Path | None) -> RunSettings:
    """Read `config.yaml` of a run directory.

    Args:
        run_dir: directory that holds the `global_step_N` directories; None for a model without a run.

    Returns:
        What the file says, with the defaults for what it does not say. Without a file the experiment is the run
        directory's name.

    Raises:
        UserError: the file is there but is no YAML mapping, or a setting has the wrong type.
    """
    if run_dir is None:
        return RunSettings()
    path = run_dir / "config.yaml"
    if not path.is_file():
        return RunSettings(experiment=run_dir.name)
    config = read_config_file(path)
    return RunSettings(
        recipe=_setting(config, "eval", "recipe", path),
        project=_setting(config, "trainer", "project_name", path) or DEFAULT_PROJECT,
        experiment=_setting(config, "trainer", "experiment_name", path) or run_dir.name,
        base=_setting(config, "model", "partial_pretrain", path),
    )


def _setting(config: Mapping[str, Any], section: str, name: str, path: Path) -> str | None:
    values = config.get(section) or {}
    if not isinstance(values, Mapping):
        raise UserError(f"{path}: {section} is {values!r}; it must be a mapping")
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{path}: {section}.{name} is {value!r}; it must be a string")
    return value or None
