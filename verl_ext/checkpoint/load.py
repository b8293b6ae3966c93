"""Loads a checkpoint that any number of ranks wrote into this rank's part of the model and the optimizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, set_seed

from verl_ext.checkpoint.manifest import EXPORT, MODEL, OPTIMIZER, is_verl_checkpoint
from verl_ext.checkpoint.resume import another_optimizer
from verl_ext.checkpoint.shards import SavedTensor, ShardFiles
from verl_ext.distributed import local_rows, to_local
from verl_ext.errors import UserError

ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
"""In the name of a tensor that belongs to one expert of a mixture."""
IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
"""Hyperparameters of torch's optimizers that select the implementation: this machine's, not the checkpoint's."""
OptimizerState = dict[int, dict[str, SavedTensor]]
"""Saved state by position of the parameter in the optimizer, and by name."""


# The model


@torch.no_grad()
def load_model(model: torch.nn.Module, checkpoint: Path) -> None:
    """Copy this rank's rows into each parameter of a model that is sharded with FSDP2, one tensor at a time.

    Raises:
        UserError: the checkpoint is of another model.
    """
    files = ShardFiles(checkpoint, MODEL)
    state = model.state_dict()
    _require_same_names(set(files.content(0)), set(state), checkpoint)
    for name, tensor in state.items():
        saved = files.tensor(name)
        if saved.shape != tensor.shape:
            raise UserError(
                f"{checkpoint} is of another model: its {name} is {tuple(saved.shape)}, this run's is "
                f"{tuple(tensor.shape)}; restore the model's configuration or give another trainer.experiment_name"
            )
        saved.copy_rows(*local_rows(tensor), to_local(tensor))


def _require_same_names(saved: set[str], expected: set[str], checkpoint: Path) -> None:
    if saved == expected:
        return
    if any(ONE_EXPERT.search(name) for name in saved - expected):
        raise UserError(
            f"{checkpoint} has a tensor for each expert, as transformers 4 had; the installed release has one for "
            "all experts of a layer, so the optimizer's state does not fit. Start another run from the weights, "
            f"by model.partial_pretrain={checkpoint / EXPORT} and another trainer.experiment_name"
        )
    missing, extra = sorted(expected - saved), sorted(saved - expected)
    difference = f"it lacks {missing[0]}" if missing else f"it has {extra[0]}, which this run does not have"
    raise UserError(
        f"{checkpoint} is of another model: {difference} ({len(missing)} tensors missing, {len(extra)} too many); "
        "restore the model section of the configuration or give another trainer.experiment_name"
    )


# The optimizer


@torch.no_grad()
def load_optimizer(model: PreTrainedModel, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Load the optimizer's parameter groups and this rank's rows of its state.

    Args:
        model: whose parameters it trains.
        optimizer: over the same parameters as when it was saved, in the same order.
        checkpoint: a complete `global_step_N`.

    Raises:
        UserError: the checkpoint has no optimizer state, or that of another optimizer.
    """
    files = ShardFiles(checkpoint, OPTIMIZER)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {name: _local_state(saved, parameters[index]) for name, saved in entry.items()}
        for index, entry in _saved_state(model, optimizer, parameters, files).items()
    }
    own_groups, saved_groups = optimizer.state_dict()["param_groups"], files.content(0)["param_groups"]
    # Checkpoints of verl do not name their optimizer. Another version of the same one may have dropped hyperparameters
    # or added some, but not both.
    dropped, added = saved_groups[0].keys() - own_groups[0].keys(), own_groups[0].keys() - saved_groups[0].keys()
    if dropped and added:
        names = f"with {', '.join(sorted(dropped))}, but this run's has {', '.join(sorted(added))} instead"
        raise another_optimizer(checkpoint, names)
    own_parts = [{key: own[key] for key in ("params", *IMPLEMENTATION) if key in own} for own in own_groups]
    groups = [{**saved, **own} for saved, own in zip(saved_groups, own_parts)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _saved_state(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], files: ShardFiles
) -> OptimizerState:
    """The saved state of the optimizer's parameters; refuses that of other parameters."""
    saved = files.content(0)
    groups = optimizer.param_groups, saved["param_groups"]
    sizes, saved_sizes = ([len(group["params"]) for group in each] for each in groups)
    state: OptimizerState | None = None
    if sizes == saved_sizes:
        state = {index: _tensors_at(files, index) for index in saved["state"]}
    elif is_verl_checkpoint(files.directory) and len(sizes) == len(saved_sizes) == 1:
        state = _verl_state(model, parameters, files, saved_sizes[0])
    if state is None:
        raise UserError(
            f"the optimizer of {files.directory} has parameter groups of {saved_sizes} tensors, this run's of {sizes}; "
            "restore the optim and model sections of the configuration, or load only the weights, by "
            f"trainer.resume_from_path={files.directory} and trainer.checkpoint.load_contents=[model]"
        )
    return state


def _tensors_at(files: ShardFiles, index: int) -> dict[str, SavedTensor]:
    """The saved state of the parameter at a position, by name; empty for a frozen one."""
    return {name: files.tensor("state", index, name) for name in files.content(0)["state"].get(index, ())}


def _local_state(saved: SavedTensor, parameter: torch.Tensor) -> Any:
    """This rank's part of one entry of a parameter's state, placed like the parameter."""
    first = saved.piece(0)
    if not isinstance(first, torch.Tensor):
        return first
    if isinstance(first, DTensor) or isinstance(saved, FlatParameterSlice):
        target = torch.empty_like(parameter, dtype=saved.dtype)
        saved.copy_rows(*local_rows(target), to_local(target))
        return target
    if first.numel() == 1:
        return first.clone()  # the step count, the same on every rank
    if saved.files.world_size != dist.get_world_size():
        raise UserError(
            f"the optimizer keeps {'.'.join(map(str, saved.keys))} separately on each rank, so {saved.files.directory} "
            f"resumes only on its own number of ranks; start {saved.files.world_size} ranks"
        )
    return saved.piece(dist.get_rank()).clone()


# Optimizers that verl saved
#
# verl gives its optimizer the frozen parameters too. With FSDP1 the optimizer has one parameter for each unit, which is
# a block, or everything outside of the blocks: the unit's tensors concatenated to one vector and cut into equal pieces,
# one for each rank.


class FlatParameterSlice(SavedTensor):
    """A tensor that begins at the element `offset` of the flat parameter of a unit of FSDP1."""

    def __init__(self, files: ShardFiles, keys: tuple, offset: int, shape: torch.Size) -> None:
        super().__init__(files, keys)
        self.offset, self._shape = offset, shape

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self._shape

    def copy_rows(self, start: int, end: int, target: torch.Tensor) -> None:
        """See `SavedTensor.copy_rows`."""
        row_numel, piece_numel = self._shape[1:].numel(), self.piece(0).numel()
        first, last = self.offset + start * row_numel, self.offset + end * row_numel
        for rank in range(first // piece_numel, -(-last // piece_numel)):
            low, high = max(first, rank * piece_numel), min(last, (rank + 1) * piece_numel)
            values = self.piece(rank)[low - rank * piece_numel : high - rank * piece_numel]
            target.view(-1)[low - first : high - first].copy_(values)


def _verl_state(
    model: PreTrainedModel, trained: Sequence[torch.Tensor], files: ShardFiles, num_saved: int
) -> OptimizerState | None:
    """The state that verl's optimizer, which has one group, saved of the trained parameters.

    Args:
        model: sharded with FSDP2.
        trained: parameters of this run's optimizer, in its order.
        files: of verl's optimizer.
        num_saved: number of its parameters.

    Returns:
        None if it had other parameters.
    """
    parameters = list(model.parameters())
    if num_saved == len(parameters):
        entries = {id(parameter): _tensors_at(files, index) for index, parameter in enumerate(parameters)}
    else:
        units = _fsdp1_units(model)
        if num_saved != len(units) or not all(_fits(files, index, unit) for index, unit in enumerate(units)):
            return None
        entries = {key: entry for index, unit in enumerate(units) for key, entry in _unit_state(files, index, unit)}
    return {index: entry for index, parameter in enumerate(trained) if (entry := entries[id(parameter)])}


def _fsdp1_units(model: PreTrainedModel) -> list[list[torch.Tensor]]:
    """The parameters of each unit of FSDP1, in the order of its optimizer."""
    classes = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if classes & {base.__name__ for base in type(module).__mro__}]
    unit_of = {id(parameter): index for index, block in enumerate(blocks, start=1) for parameter in block.parameters()}
    units: list[list[torch.Tensor]] = [[] for _ in range(len(blocks) + 1)]
    for parameter in model.parameters():
        units[unit_of.get(id(parameter), 0)].append(parameter)
    return units


def _fits(files: ShardFiles, index: int, unit: Sequence[torch.Tensor]) -> bool:
    """Whether the pieces of a flat parameter are as long as the unit's tensors require."""
    length = sum(parameter.numel() for parameter in unit)
    pieces = [value for value in files.content(0)["state"].get(index, {}).values() if value.dim()]
    return all(piece.dim() == 1 and piece.numel() == -(-length // files.world_size) for piece in pieces)


def _unit_state(
    files: ShardFiles, index: int, unit: Sequence[torch.Tensor]
) -> list[tuple[int, dict[str, SavedTensor]]]:
    """The id of each parameter of a unit, and its saved state by name."""
    found, offset = [], 0
    for parameter in unit:
        entry = _tensors_at(files, index)
        for name, saved in entry.items():
            if saved.piece(0).dim():  # otherwise the step count
                entry[name] = FlatParameterSlice(files, saved.keys, offset, parameter.shape)
        found.append((id(parameter), entry))
        offset += parameter.numel()
    return found


# Random numbers


def derived_seed(seed: int, step: int, stream: int) -> int:
    """Seed of a rank's random numbers after the number of ranks changed.

    It depends only on the run's seed, the step and the data-parallel rank, so that the same change gives the same
    numbers. The saved random states belong to ranks that no longer exist.
    """
    return int(np.random.SeedSequence([seed, step, stream]).generate_state(1)[0])


def reseed(seed: int, step: int, stream: int) -> None:
    """Seed Python, NumPy and torch with `derived_seed`."""
    set_seed(derived_seed(seed, step, stream))
