"""A controller's weights in one file, by the names that users of the older code load: `best_model.pt` and the like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_ext.checkpoint.save import FileWriter
from verl_ext.checkpoint.shards import to_full
from verl_ext.controller.checkpoints import STATE
from verl_ext.files import replacing, write_errors

BEST_MODEL = "best_model.pt"


def epoch_file(epoch: int) -> str:
    """Name of the file of an epoch, counted from 1."""
    return f"checkpoint_epoch_{epoch}.pt"


def write_controllers(paths: Sequence[Path], weights: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
    """Write weights on the CPU and what is said of them; each file is there whole or not at all.

    Raises:
        UserError: the disk refuses it.
    """
    for path in paths:
        with write_errors(path), replacing(path) as temporary, FileWriter() as writer:
            writer.write_object(temporary, {STATE: dict(weights), **about})


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state of a sharded model on the CPU; collective."""
    return {name: to_full(tensor).cpu() for name, tensor in model.state_dict().items()}
