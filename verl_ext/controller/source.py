"""Finds an exported controller by path, with the run that trained it. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from verl_ext.checkpoint.manifest import EXPORT, complete_checkpoints, step_of
from verl_ext.config.run_config import read_config_file
from verl_ext.errors import UserError
from verl_ext.files import parse_json
from verl_ext.model_files import CONTROLLER_TYPE


@dataclass(frozen=True)
class ControllerSource:
    """An exported controller.

    Attributes:
        export: directory of the export.
        run_dir: directory of the training run; None for an export outside a run.
        step: `global_step` of the checkpoint; None without a run.
    """

    export: Path
    run_dir: Path | None = None
    step: int | None = None

    @property
    def label(self) -> str:
        """Directory name of the evaluation."""
        return "adaptive" if self.step is None else f"adaptive_step_{self.step}"

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The run's configuration as plain values; empty without a run.

        Raises:
            UserError: the file is missing or unreadable, or belongs to another stage.
        """
        if self.run_dir is None:
            return {}
        path = self.run_dir / "config.yaml"
        config = read_config_file(path)
        missing = [section for section in ("data", "controller", "latency") if section not in config]
        if missing:
            raise UserError(
                f"{path} has no section {missing[0]}, so it is not a configuration of the stage budget; "
                "specify a controller's checkpoint"
            )
        return config

    def setting(self, section: str, name: str) -> Any:
        """A value in the run's configuration; None without a run or without such a key."""
        return self.config.get(section, {}).get(name)


def find_controller(path: Path) -> ControllerSource:
    """Find the controller at a path.

    Args:
        path: an export, a `global_step_N`, or a run directory, whose newest complete checkpoint with an export is used.

    Raises:
        UserError: the path has no controller.
    """
    path = path.resolve()
    if step_of(path) is None and path.name != EXPORT:
        complete = complete_checkpoints(path).items()
        exported = (each for each, saved in complete if (each / EXPORT).is_dir() and EXPORT not in saved.deferred)
        path = next(exported, path)
    export = path / EXPORT if step_of(path) is not None else path
    if not _is_controller(export):
        raise UserError(
            f"{path} has no export of a budget controller; specify the huggingface folder of a checkpoint of the stage "
            "budget, its global_step_N, or the run's directory"
        )
    step = step_of(export.parent)
    return ControllerSource(export) if step is None else ControllerSource(export, export.parent.parent, step)


def _is_controller(export: Path) -> bool:
    try:
        return parse_json((export / "config.json").read_text())["model_type"] == CONTROLLER_TYPE
    except (OSError, ValueError, KeyError, TypeError):
        return False
