"""Finds an exported controller by path, with the run that trained it. Does not import torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from verl_ext.checkpoint.manifest import EXPORT, damaged_export_files, exported_checkpoints, step_of
from verl_ext.commands import program
from verl_ext.config.run_config import read_config_file
from verl_ext.console import warn
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
    """Find the controller at a path, and compare the files of a checkpoint's export with its manifest.

    Args:
        path: an export, a `global_step_N`, or a run directory, whose newest complete checkpoint with an export is used.

    Raises:
        UserError: the path has no controller, or the export is damaged.
    """
    path = path.resolve()
    if step_of(path) is None and path.name != EXPORT:
        path = _newest_exported(path) or path
    export = path / EXPORT if step_of(path) is not None else path
    if not _is_controller(export):
        raise UserError(
            f"{path} has no export of a budget controller; specify the huggingface folder of a checkpoint of the stage "
            "budget, its global_step_N, or the run's directory"
        )
    step = step_of(export.parent)
    if step is None:
        return ControllerSource(export)
    _require_undamaged(export.parent)
    return ControllerSource(export, export.parent.parent, step)


def _newest_exported(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run with an export; warns if a newer one is skipped as incomplete."""
    problems: list[str] = []

    def skip(checkpoint: Path, error: ValueError) -> None:
        problems.append(f"{checkpoint.name} is not complete: {error}")

    for checkpoint, is_usable in exported_checkpoints(run_dir, skip):
        if is_usable:
            for problem in problems:
                warn(f"{problem}; using {checkpoint.name} instead")
            return checkpoint
        problems.append(f"{checkpoint.name} has no complete {EXPORT}/")
    return None


def _require_undamaged(checkpoint: Path) -> None:
    """Refuse a checkpoint whose export differs from its manifest; a copy of the export alone has none."""
    try:
        damage = next((f"its file {name} {what}" for name, what in damaged_export_files(checkpoint).items()), None)
    except ValueError as error:
        damage = str(error)
    if damage is not None:
        raise UserError(
            f"{checkpoint} is damaged: {damage}; write its {EXPORT}/ again with `{program('checkpoint')} export "
            f"{shlex.quote(str(checkpoint))}`, or specify another checkpoint"
        )


def _is_controller(export: Path) -> bool:
    try:
        return parse_json((export / "config.json").read_text())["model_type"] == CONTROLLER_TYPE
    except (OSError, ValueError, KeyError, TypeError):
        return False
