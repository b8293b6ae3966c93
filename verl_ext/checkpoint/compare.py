"""Compares the tensors of two checkpoints, whatever the number of ranks that wrote each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl_ext.checkpoint.shards import MODEL, SavedTensor, ShardFiles


@dataclass(frozen=True)
class Difference:
    """What came of comparing one tensor.

    Attributes:
        name: of the tensor; optimizer state is `optim.<parameter's number>.<entry>`.
        largest: largest absolute difference of two elements.
        relative: `largest` over the largest absolute element of the first.
        what: how they differ, in words; empty when they are equal.
    """

    name: str
    largest: float = 0.0
    relative: float = 0.0
    what: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether they are the same bit for bit."""
        return not self.what

    @property
    def size(self) -> float:
        """What to sort by; tensors that cannot be compared come first."""
        return self.relative if math.isfinite(self.relative) else math.inf


def compare(first: Path, second: Path, kinds: Sequence[str], progress: Callable[[int], None]) -> Iterator[Difference]:
    """Compare all tensors of two checkpoints, one of each in memory at a time.

    Args:
        first: a `global_step_N`.
        second: another.
        kinds: MODEL, OPTIMIZER.
        progress: receives the number of bytes of the first that were compared.

    Raises:
        UserError: shards are missing.
    """
    for kind in kinds:
        one, other = tensors(first, kind), tensors(second, kind)
        for name in [*one, *(name for name in other if name not in one)]:
            yield difference(name, one.get(name), other.get(name))
            progress(size_of(one[name]) if name in one else 0)


def tensors(checkpoint: Path, kind: str) -> dict[str, SavedTensor]:
    """Every tensor of one kind of shard by a name for people."""
    files = ShardFiles(checkpoint, kind)
    content: dict[Any, Any] = files.content(0)
    if kind == MODEL:
        return {name: files.tensor(name) for name in content}
    return {
        f"{kind}.{index}.{name}": files.tensor("state", index, name)
        for index, entry in content["state"].items()
        for name, value in entry.items()
        if isinstance(value, torch.Tensor)
    }


def difference(name: str, first: SavedTensor | None, second: SavedTensor | None) -> Difference:
    """How two tensors differ; None for one that is not there."""
    if first is None or second is None:
        return Difference(name, math.inf, math.inf, f"only in {'B' if first is None else 'A'}")
    if first.shape != second.shape:
        return Difference(name, math.inf, math.inf, f"{tuple(first.shape)} against {tuple(second.shape)}")
    one, other = first.whole(), second.whole()
    if one.dtype == other.dtype and torch.equal(_bits(one), _bits(other)):
        return Difference(name)
    return measured(name, one, other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, in which NaN equals NaN."""
    return tensor.reshape(-1).view(torch.uint8)


def measured(name: str, one: torch.Tensor, other: torch.Tensor) -> Difference:
    """The difference of two tensors of one shape that are not the same."""
    gap = (one.double() - other.double()).abs().max().item()
    scale = one.double().abs().max().item()
    what = f"{one.dtype} against {other.dtype}" if one.dtype != other.dtype else "values"
    return Difference(name, gap, gap / scale if scale else math.inf, what)


def size_of(tensor: SavedTensor) -> int:
    """Of the whole tensor."""
    return tensor.shape.numel() * tensor.dtype.itemsize


def num_bytes(checkpoint: Path, kinds: Sequence[str]) -> int:
    """Of all tensors of these kinds."""
    return sum(size_of(tensor) for kind in kinds for tensor in tensors(checkpoint, kind).values())
