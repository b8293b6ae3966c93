"""Reads the shards that any number of ranks wrote: memory-mapped, row by row, without a process group."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from verl_ext.checkpoint.safe_load import load_shard
from verl_ext.checkpoint.stock import KINDS
from verl_ext.errors import UserError

MODEL, OPTIMIZER, EXTRA = KINDS


def shard_name(kind: str, world_size: int, rank: int) -> str:
    """verl's name for what one rank saves."""
    return f"{kind}_world_size_{world_size}_rank_{rank}.pt"


def shard_rows(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """First row, and the one behind the last, of a rank's part of a tensor that FSDP2 sharded along its first axis."""
    chunk = -(-num_rows // num_ranks)
    return min(rank * chunk, num_rows), min((rank + 1) * chunk, num_rows)


def rows_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The rows of a DTensor that this rank holds; all of them for a plain tensor."""
    num_rows = tensor.shape[0] if tensor.dim() else 1
    if not is_sharded(tensor):
        return 0, num_rows
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # this rank holds a part of it
    return shard_rows(num_rows, tensor.device_mesh.size(), coordinate[0])


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether each rank holds some rows of it.

    Raises:
        UserError: it is sharded in another way than FSDP2 does by itself.
    """
    if not isinstance(tensor, DTensor) or tensor.placements == (Replicate(),):
        return False
    if tensor.placements != (Shard(0),):
        raise UserError(f"a tensor is placed as {tensor.placements}; only FSDP2's sharding of the first axis is read")
    return True


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of it, as a plain tensor that shares its memory."""
    with torch.no_grad():  # else to_local is a view that autograd tracks
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a sharded tensor, on every rank; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class ShardFiles:
    """The files of one kind in a checkpoint, each opened when it is first needed.

    Args:
        directory: a `global_step_N`.
        kind: MODEL, OPTIMIZER or EXTRA.

    Raises:
        UserError: there are none, or not those of one world size.
    """

    def __init__(self, directory: Path, kind: str) -> None:
        self.directory, self.kind = directory, kind
        pattern = re.compile(rf"{kind}_world_size_(\d+)_rank_(\d+)\.pt")
        found = [match for path in directory.iterdir() if (match := pattern.fullmatch(path.name))]
        sizes = {int(match.group(1)) for match in found}
        if not found:
            raise UserError(f"{directory} holds no {kind} shards; trainer.checkpoint.load_contents says what is loaded")
        if len(sizes) != 1 or len(found) != max(sizes):
            raise UserError(
                f"{directory} holds {len(found)} {kind} shards of {sorted(sizes)} ranks; restore the others"
            )
        self.world_size = sizes.pop()
        self._contents: dict[int, Any] = {}

    def content(self, rank: int) -> Any:
        """What one rank saved, its tensors mapped into memory and read on access."""
        if rank not in self._contents:
            path = self.directory / shard_name(self.kind, self.world_size, rank)
            self._contents[rank] = load_shard(path)
        return self._contents[rank]

    def tensor(self, *keys: Any) -> SavedTensor:
        """The tensor under nested keys, all its shards together."""
        return SavedTensor(self, keys)


class SavedTensor:
    """One tensor over the shard files of all ranks.

    Args:
        files: where it lies.
        keys: its place in each file, from the outside in.
    """

    def __init__(self, files: ShardFiles, keys: tuple[Any, ...]) -> None:
        self.files, self.keys = files, keys

    def piece(self, rank: int) -> torch.Tensor:
        """What one rank saved of it."""
        value = self.files.content(rank)
        for key in self.keys:
            value = value[key]
        return value

    @cached_property
    def sharded(self) -> bool:
        """Whether each rank saved some rows; else rank 0's is taken."""
        return is_sharded(self.piece(0))

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return self.piece(0).shape

    @property
    def dtype(self) -> torch.dtype:
        """As saved."""
        return self.piece(0).dtype

    def copy_rows(self, start: int, end: int, target: torch.Tensor) -> None:
        """Copy rows from `start` to before `end` into `target` (end - start, ...); no other is read."""
        if not self.sharded:
            source = self.piece(0)
            target.copy_(source[start:end] if source.dim() else source)
            return
        for rank in range(self.files.world_size):
            first, last = shard_rows(self.shape[0], self.files.world_size, rank)
            low, high = max(start, first), min(end, last)
            if low < high:
                target[low - start : high - start].copy_(local_part(self.piece(rank))[low - first : high - first])

    def whole(self) -> torch.Tensor:
        """All of it, in new memory."""
        target = torch.empty(self.shape, dtype=self.dtype)
        self.copy_rows(0, self.shape[0] if target.dim() else 1, target)
        return target
