"""Rank 0's choice of the checkpoint to go on from."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from verl_ext.checkpoint.resume import find_checkpoint, require_world_size
from verl_ext.metrics.notice import warn


def checkpoint_to_resume(config: DictConfig, world_size: int) -> Path | None:
    """Pick the checkpoint, and say so in verl's words.

    Args:
        config: the resolved configuration.
        world_size: ranks of this run.

    Raises:
        UserError: see `find_checkpoint` and `require_world_size`.
    """
    trainer = config.trainer
    path = find_checkpoint(Path(trainer.default_local_dir), trainer.resume_mode, trainer.resume_from_path, warn)
    if path is not None:
        require_world_size(path, world_size)
        print(f"Found checkpoint: {path.absolute()}", file=sys.__stdout__, flush=True)
    return path
