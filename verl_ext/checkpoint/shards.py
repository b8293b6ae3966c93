"""Reads the shards of any number of ranks: memory-mapped, by rows, without a process group.

A checkpoint may come from an untrusted source, so no code in a shard is run.
"""

from __future__ import annotations

import logging
import pickle
import typing
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from verl_ext.checkpoint.manifest import shard_name, shards_of
from verl_ext.distributed import is_sharded, shard_rows, to_local
from verl_ext.errors import UserError

# Untrusted files

_RECONSTRUCT: Any = np.zeros(0).__reduce__()[0]
"""The function that unpickles an array; its module was renamed in NumPy 2."""
ALLOWED = (
    # RNG states
    *((_RECONSTRUCT, "numpy.core.multiarray._reconstruct"), (_RECONSTRUCT, "numpy._core.multiarray._reconstruct")),
    *(np.ndarray, np.dtype, type(np.dtype(np.uint32))),
    # optimizers: verl passes betas as OmegaConf containers
    *(DictConfig, ListConfig, AnyNode, Metadata, ContainerMetadata, defaultdict, dict, list, int),
    (typing.Any, "typing.Any"),
)
"""Types in verl's shards besides tensors and plain values; creating them has no side effects."""


def load_shard(path: Path) -> Any:
    """Load a shard; its tensors are memory-mapped and read on access.

    Raises:
        UserError: the file contains objects that could run code, or is not a file of `torch.save`.
    """
    with safe_globals(list(ALLOWED)), _without_mesh_warnings():
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (EOFError, RuntimeError) as error:  # raised for an empty or truncated file
            raise UserError(f"{path} cannot be read; it is damaged, or not a file of torch.save") from error
        except pickle.UnpicklingError as error:
            unsafe = get_unsafe_globals_in_checkpoint(path)
            if not unsafe:
                raise UserError(f"{path} cannot be read; it is damaged, or not a file of torch.save") from error
            raise UserError(
                f"{path} is not loaded, because it names {', '.join(sorted(unsafe))}, which may run code; use another "
                "checkpoint, or, if you trust this one, allow them with torch.serialization.add_safe_globals in the "
                "module that model.external_lib names"
            ) from error


@contextmanager
def _without_mesh_warnings() -> Iterator[None]:
    """Silence torch's warnings about process groups that a shard names but this process does not have."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# Shard files


class ShardFiles:
    """The shards of one kind in a checkpoint, each opened on first use."""

    def __init__(self, directory: Path, kind: str) -> None:
        """Find the shards of a kind (MODEL, OPTIMIZER or EXTRA); refuse a checkpoint without all of them."""
        self.directory, self.kind = directory, kind
        found = shards_of(directory, kind).values()
        sizes = {world_size for _, world_size, _ in found}
        if not found:
            raise UserError(f"{directory} contains no {kind} shards; check trainer.checkpoint.load_contents")
        if len(sizes) != 1 or len(found) != max(sizes):
            raise UserError(
                f"{directory} holds {len(found)} {kind} shards of {sorted(sizes)} ranks; restore the missing ones"
            )
        self.world_size = sizes.pop()
        self._contents: dict[int, Any] = {}

    def content(self, rank: int) -> Any:
        """The content of a rank's shard; see `load_shard`."""
        if rank not in self._contents:
            self._contents[rank] = load_shard(self.directory / shard_name(self.kind, self.world_size, rank))
        return self._contents[rank]

    def tensor(self, *keys: Any) -> SavedTensor:
        """The tensor under nested keys, across the shards of all ranks."""
        return SavedTensor(self, keys)


class SavedTensor:
    """A tensor across the shards of all ranks; `keys` are its nested keys in each shard."""

    def __init__(self, files: ShardFiles, keys: tuple[Any, ...]) -> None:
        self.files, self.keys = files, keys

    def piece(self, rank: int) -> torch.Tensor:
        """The part of the tensor that a rank saved."""
        value = self.files.content(rank)
        for key in self.keys:
            value = value[key]
        return value

    @cached_property
    def sharded(self) -> bool:
        """Whether the ranks saved different rows; otherwise rank 0's copy is read."""
        return is_sharded(self.piece(0))

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self.piece(0).shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the file."""
        return self.piece(0).dtype

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def copy_rows(self, start: int, end: int, target: torch.Tensor) -> None:
        """Copy rows `start` to `end` (exclusive) into `target` (end - start, ...); no other rows are read."""
        if not self.sharded:
            source = self.piece(0)
            target.copy_(source[start:end] if source.dim() else source)
            return
        for rank in range(self.files.world_size):
            first, last = shard_rows(self.shape[0], self.files.world_size, rank)
            low, high = max(start, first), min(end, last)
            if low < high:
                target[low - start : high - start].copy_(to_local(self.piece(rank))[low - first : high - first])

    def full(self) -> torch.Tensor:
        """The whole tensor in newly allocated memory."""
        target = torch.empty(self.shape, dtype=self.dtype)
        self.copy_rows(0, self.shape[0] if target.dim() else 1, target)
        return target
