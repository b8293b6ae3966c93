"""Whether a checkpoint still fits on the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from verl_ext.checkpoint.shards import local_part
from verl_ext.errors import UserError
from verl_ext.files import GIB, free_bytes

MARGIN = 1.05  # file headers, small files, and what others write to the same disk meanwhile


def bytes_of(state: Any) -> int:
    """Bytes of the tensors in nested state, as far as this rank holds them; tied ones count once, as they are saved."""
    sizes = {(part.data_ptr(), part.shape): part.numel() * part.element_size() for part in parts_of(state)}
    return sum(sizes.values())


def parts_of(state: Any) -> Iterator[torch.Tensor]:
    """What this rank holds of every tensor in nested state."""
    if isinstance(state, torch.Tensor):
        yield local_part(state)
    elif isinstance(state, dict | list | tuple):
        for item in state.values() if isinstance(state, dict) else state:
            yield from parts_of(item)


def require_space(directory: Path, num_bytes: int, step: int) -> None:
    """Refuse to begin a save that cannot fit.

    Raises:
        UserError: less than `num_bytes` are free.
    """
    free = free_bytes(directory)
    if free < num_bytes:
        raise UserError(
            f"global_step_{step} cannot be saved: it takes {num_bytes / GIB:.2f} GiB and {directory} has "
            f"{free / GIB:.2f} GiB free; "
            "make room or lower trainer.max_ckpt_to_keep, then type the same command again: "
            "every earlier checkpoint is as it was"
        )


def warn_if_next_will_not_fit(directory: Path, num_bytes: int, warn: Callable[[str], None]) -> None:
    """Say it one save ahead when the next one, as large as the last, has no room."""
    free = free_bytes(directory)
    if free < num_bytes * MARGIN:
        warn(
            f"the next checkpoint takes about {num_bytes / GIB:.2f} GiB and {directory} has {free / GIB:.2f} GiB free, "
            "so it will fail; make room before it is due"
        )
