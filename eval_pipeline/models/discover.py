"""Looks for checkpoints of a run that are complete and have an export."""

from __future__ import annotations

from pathlib import Path

from eval_pipeline.models.checkpoint import Checkpoint, find_checkpoint
from verl_ext.checkpoint.manifest import EXPORT, list_checkpoints, why_incomplete
from verl_ext.console import warn
from verl_ext.errors import UserError


class Discovery:
    """Finds a run's checkpoints; says once of each that cannot be evaluated why.

    Args:
        run_dir: holds `global_step_N` directories.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._known: dict[Path, Checkpoint] = {}
        self._refused: dict[Path, str] = {}

    def checkpoints(self) -> list[Checkpoint]:
        """All that can be evaluated and are there now, the oldest first."""
        found = [self._look_at(path) for path in reversed(list_checkpoints(self._run_dir))]
        return [checkpoint for checkpoint in found if checkpoint is not None]

    def _look_at(self, path: Path) -> Checkpoint | None:
        problem = why_incomplete(path)
        if problem is not None:
            self._refuse(path, problem)
            return None
        if not (path / EXPORT / "config.json").is_file():
            return None  # `export.every` exports fewer checkpoints than are saved
        if path not in self._known:
            try:
                self._known[path] = find_checkpoint(path)
            except UserError as error:
                self._refuse(path, str(error))
                return None
        return self._known[path]

    def _refuse(self, path: Path, problem: str) -> None:
        if self._refused.get(path) != problem and path.exists():
            warn(f"skipping {path}: {problem}")
            self._refused[path] = problem
