"""The few settings that an evaluation takes from the training run it judges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.config.written import load_written
from verl_ext.errors import UserError

DEFAULT_PROJECT = "eval_pipeline"


@dataclass(frozen=True)
class RunConfig:
    """Settings of the training run; the defaults serve a model that no run saved."""

    recipe: str | None = None
    """`eval.recipe`: the recipe that its checkpoints are evaluated by."""
    project: str = DEFAULT_PROJECT
    """`trainer.project_name`: the W&B project that the figures go to."""
    experiment: str | None = None
    """`trainer.experiment_name`: groups the evaluations of one run in W&B."""
    base: str | None = None
    """`model.partial_pretrain`: what it began from."""


def read_run_config(run_dir: Path | None) -> RunConfig:
    """Read `config.yaml` of a run directory.

    Args:
        run_dir: directory that holds the `global_step_N` directories; None for a model without a run.

    Returns:
        What the file says, with the defaults where it says nothing. Without a file the experiment is the run
        directory's name.

    Raises:
        UserError: the file is there but is no YAML mapping, or a setting has the wrong type.
    """
    if run_dir is None:
        return RunConfig()
    path = run_dir / "config.yaml"
    if not path.is_file():
        return RunConfig(experiment=run_dir.name)
    config = load_written(path)
    return RunConfig(
        recipe=_setting(config, "eval.recipe", path),
        project=_setting(config, "trainer.project_name", path) or DEFAULT_PROJECT,
        experiment=_setting(config, "trainer.experiment_name", path) or run_dir.name,
        base=_setting(config, "model.partial_pretrain", path),
    )


def _setting(config: DictConfig, key: str, path: Path) -> str | None:
    try:
        value = OmegaConf.select(config, key)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: cannot resolve {key} ({error}); write its value there") from error
    if value is not None and not isinstance(value, str):
        raise UserError(f"{path}: {key} is {value!r}; it must be a string")
    return value or None
