"""`diff`: compares the tensors of two checkpoints, which may have different numbers of ranks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl_ext.checkpoint.inspection import require_steps
from verl_ext.checkpoint.manifest import MODEL, OPTIMIZER, is_verl_checkpoint, step_of
from verl_ext.checkpoint.shards import SavedTensor, ShardFiles
from verl_ext.console import print_line, progress_bar, text_table
from verl_ext.errors import UserError


@dataclass(frozen=True)
class Difference:
    """Result of comparing one tensor.

    Attributes:
        name: name of the tensor; optimizer state is named `optim.<parameter index>.<entry>`, followed by `.rank<rank>`
            if verl's FSDP1 saved it.
        largest: largest absolute difference between corresponding elements.
        relative: `largest` divided by the largest absolute element of the first tensor.
        what: description of the difference; empty if the tensors are equal bit for bit.
    """

    name: str
    largest: float = 0.0
    relative: float = 0.0
    what: str = ""


def diff(arguments: argparse.Namespace, max_shown: int) -> int:
    """Print the differences, largest first, at most `max_shown` without --all. Return 1 if there are any."""
    first, second = (_resolve(arguments.run_dir, word) for word in arguments.pair)
    kinds = (MODEL, OPTIMIZER) if arguments.optimizer else (MODEL,)
    total = sum(tensor.num_bytes for kind in kinds for tensor in _tensors(first, kind).values())
    with progress_bar(total=total, desc="comparing", unit="B") as bar:
        differences = list(compare(first, second, kinds, bar.update))
    unequal = [each for each in differences if each.what]
    unequal.sort(key=lambda each: -each.relative if math.isfinite(each.relative) else -math.inf)
    shown = unequal if arguments.all else unequal[:max_shown]
    if shown:
        header = ("tensor", "largest |A-B|", "relative", "what")
        print_line(text_table([header, *((e.name, f"{e.largest:.3g}", f"{e.relative:.3g}", e.what) for e in shown)]))
    if len(shown) < len(unequal):
        print_line(f"... and {len(unequal) - len(shown)} more; --all lists them")
    print_line(f"{len(differences) - len(unequal)} of {len(differences)} tensors are equal bit for bit")
    return 1 if unequal else 0


def _resolve(run_dir: Path, word: str) -> Path:
    if word.isdecimal():
        if not run_dir.is_dir():
            raise UserError(f"{run_dir} is not a directory; specify a run directory")
        return require_steps(run_dir, [int(word)])[0]
    path = Path(word)
    if not path.is_dir() or step_of(path.resolve()) is None:
        raise UserError(f"'{word}' is neither a step of {run_dir} nor a global_step_N directory; `ls` shows the steps")
    return path


def compare(first: Path, second: Path, kinds: Sequence[str], progress: Callable[[int], None]) -> Iterator[Difference]:
    """Compare the tensors of two checkpoints, with one tensor of each in memory at a time.

    Args:
        kinds: kinds of shards to compare, MODEL or OPTIMIZER.
        progress: called with the size of each compared tensor of the first checkpoint, in bytes.
    """
    for kind in kinds:
        one, other = _tensors(first, kind), _tensors(second, kind)
        for name in [*one, *(name for name in other if name not in one)]:
            yield _compare_tensors(name, one.get(name), other.get(name))
            progress(one[name].num_bytes if name in one else 0)


def _tensors(checkpoint: Path, kind: str) -> dict[str, SavedTensor]:
    """All tensors of one kind of shard, by readable name."""
    files = ShardFiles(checkpoint, kind)
    content: dict[Any, Any] = files.content(0)
    if kind == MODEL:
        return {name: files.tensor(name) for name in content}
    tensors: dict[str, SavedTensor] = {}
    by_rank = files.world_size > 1 and is_verl_checkpoint(checkpoint)
    for index, entry in content["state"].items():
        for name, value in entry.items():
            if not isinstance(value, torch.Tensor):
                continue
            saved = files.tensor("state", index, name)
            if by_rank and value.dim() and not saved.sharded:
                parts = {
                    f"{kind}.{index}.{name}.rank{rank}": PlainPart(saved, rank) for rank in range(files.world_size)
                }
                tensors |= parts
            else:
                tensors[f"{kind}.{index}.{name}"] = saved
    return tensors


class PlainPart(SavedTensor):
    """One rank's part of a tensor whose parts do not say which rows they are, as verl's FSDP1 saves optimizer state."""

    def __init__(self, whole: SavedTensor, rank: int) -> None:
        super().__init__(whole.files, whole.keys)
        self._rank = rank

    def piece(self, rank: int) -> torch.Tensor:
        return super().piece(self._rank)


def _compare_tensors(name: str, first: SavedTensor | None, second: SavedTensor | None) -> Difference:
    """Compare two tensors; None stands for a missing tensor."""
    if first is None or second is None:
        return Difference(name, math.inf, math.inf, f"only in {'B' if first is None else 'A'}")
    if first.shape != second.shape:
        return Difference(name, math.inf, math.inf, f"{tuple(first.shape)} against {tuple(second.shape)}")
    one, other = first.full(), second.full()
    bits, other_bits = (tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))  # as bytes, NaN equals NaN
    if one.dtype == other.dtype and torch.equal(bits, other_bits):
        return Difference(name)
    gap = (one.double() - other.double()).abs().max().item()
    scale = one.double().abs().max().item()
    what = f"{one.dtype} against {other.dtype}" if one.dtype != other.dtype else "values"
    return Difference(name, gap, gap / scale if scale else math.inf, what)
