"""Optimizer states as verl saves them where they differ from this pipeline's: frozen parameters, and FSDP1.

verl gives its optimizer the frozen parameters too. With FSDP1 it has one parameter for each unit, which is a block or
all that lies outside of the blocks: the unit's tensors behind each other as one vector, cut into a piece for each rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from verl_ext.checkpoint.shards import SavedTensor, ShardFiles

Entries = dict[int, dict[str, SavedTensor]]
"""By place in the optimizer and name: what is kept of a parameter."""


class FlatTensor(SavedTensor):
    """A tensor that lies somewhere in a unit's vector.

    Args:
        files: of the optimizer.
        keys: of the vector in each file.
        offset: its first number in the vector.
        shape: of the whole tensor.
    """

    def __init__(self, files: ShardFiles, keys: tuple, offset: int, shape: torch.Size) -> None:
        super().__init__(files, keys)
        self.offset, self._shape = offset, shape

    @property
    def shape(self) -> torch.Size:
        """See `SavedTensor.shape`."""
        return self._shape

    def copy_rows(self, start: int, end: int, target: torch.Tensor) -> None:
        """See `SavedTensor.copy_rows`."""
        row, piece = self._shape[1:].numel(), self.piece(0).numel()
        first, last = self.offset + start * row, self.offset + end * row
        for rank in range(first // piece, -(-last // piece)):
            low, high = max(first, rank * piece), min(last, (rank + 1) * piece)
            numbers = self.piece(rank)[low - rank * piece : high - rank * piece]
            target.view(-1)[low - first : high - first].copy_(numbers)


def stock_entries(
    model: PreTrainedModel, trained: Sequence[torch.Tensor], files: ShardFiles, num_saved: int
) -> Entries | None:
    """What verl's optimizer kept of the parameters that are trained; None where it was of other ones.

    Args:
        model: sharded with FSDP2.
        trained: parameters of this run's optimizer, in its order.
        files: of verl's optimizer, which has one group.
        num_saved: parameters in that group.
    """
    every = list(model.parameters())
    if num_saved == len(every):
        entries = {id(each): whole_tensors(files, place) for place, each in enumerate(every)}
    else:
        units = units_of(model)
        if num_saved != len(units) or not all(fits(files, number, unit) for number, unit in enumerate(units)):
            return None
        entries = {key: entry for number, unit in enumerate(units) for key, entry in flat_tensors(files, number, unit)}
    return {place: entry for place, each in enumerate(trained) if (entry := entries[id(each)])}


def whole_tensors(files: ShardFiles, place: int) -> dict[str, SavedTensor]:
    """What is kept of the parameter at a place, by name; nothing of a frozen one."""
    return {name: files.tensor("state", place, name) for name in files.content(0)["state"].get(place, ())}


def units_of(model: PreTrainedModel) -> list[list[torch.Tensor]]:
    """The parameters of each unit of FSDP1, in the order of its optimizer."""
    classes = set(model._no_split_modules or ())
    blocks = [each for each in model.modules() if classes & {base.__name__ for base in type(each).__mro__}]
    unit = {id(parameter): number for number, block in enumerate(blocks, start=1) for parameter in block.parameters()}
    units: list[list[torch.Tensor]] = [[] for _ in range(len(blocks) + 1)]
    for parameter in model.parameters():
        units[unit.get(id(parameter), 0)].append(parameter)
    return units


def fits(files: ShardFiles, number: int, unit: Sequence[torch.Tensor]) -> bool:
    """Whether the pieces of a vector are as long as the unit's tensors together need them to be."""
    length = sum(parameter.numel() for parameter in unit)
    pieces = [value for value in files.content(0)["state"].get(number, {}).values() if value.dim()]
    return all(piece.dim() == 1 and piece.numel() == -(-length // files.world_size) for piece in pieces)


def flat_tensors(
    files: ShardFiles, number: int, unit: Sequence[torch.Tensor]
) -> list[tuple[int, dict[str, SavedTensor]]]:
    """Identity of each parameter of a unit, and what is kept of it, by name."""
    found, offset = [], 0
    for parameter in unit:
        entry = whole_tensors(files, number)
        for name, saved in entry.items():
            if saved.piece(0).dim():  # else the count of steps
                entry[name] = FlatTensor(files, saved.keys, offset, parameter.shape)
        found.append((id(parameter), entry))
        offset += parameter.numel()
    return found
