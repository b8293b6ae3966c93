"""Loads a checkpoint that any number of ranks wrote into this rank's part of the model and the optimizer."""

from __future__ import annotations

import re
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, set_seed

from verl_ext.checkpoint.layout import EXPORT
from verl_ext.checkpoint.resume import another_optimizer
from verl_ext.checkpoint.shards import MODEL, OPTIMIZER, SavedTensor, ShardFiles, local_part, rows_of
from verl_ext.checkpoint.stock import is_stock
from verl_ext.checkpoint.stock_optimizer import Entries, FlatTensor, stock_entries, whole_tensors
from verl_ext.errors import UserError

ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
"""In the name of a tensor that belongs to one expert of a mixture."""


@torch.no_grad()
def load_model(model: torch.nn.Module, checkpoint: Path) -> None:
    """Copy each parameter's own rows into it, one tensor after another.

    Args:
        model: sharded with FSDP2 over any number of ranks.
        checkpoint: a complete `global_step_N`.

    Raises:
        UserError: the checkpoint is of another model.
    """
    files = ShardFiles(checkpoint, MODEL)
    state = model.state_dict()
    require_same_names(set(files.content(0)), set(state), checkpoint)
    for name, tensor in state.items():
        saved = files.tensor(name)
        if saved.shape != tensor.shape:
            raise UserError(
                f"{checkpoint} is of another model: its {name} is {tuple(saved.shape)}, this run's is "
                f"{tuple(tensor.shape)}; restore the model's configuration or give another trainer.experiment_name"
            )
        saved.copy_rows(*rows_of(tensor), local_part(tensor))


def require_same_names(saved: set[str], wanted: set[str], checkpoint: Path) -> None:
    """Refuse a checkpoint whose tensors are not those of the model."""
    if saved != wanted:
        if any(ONE_EXPERT.search(name) for name in saved - wanted):
            raise UserError(
                f"{checkpoint} has a tensor for each expert, as transformers 4 had; the installed release has one for "
                "all experts of a layer, so the optimizer's state does not fit. Start another run from the weights, "
                f"by model.partial_pretrain={checkpoint / EXPORT} and another trainer.experiment_name"
            )
        lacks, extra = sorted(wanted - saved), sorted(saved - wanted)
        difference = f"it lacks {lacks[0]}" if lacks else f"it has {extra[0]} beside what this run has"
        raise UserError(
            f"{checkpoint} is of another model: {difference} ({len(lacks)} tensors missing, {len(extra)} too many); "
            "restore the model section of the configuration or give another trainer.experiment_name"
        )


@torch.no_grad()
def load_optimizer(model: PreTrainedModel, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Fill the optimizer's state with this rank's rows, and its parameter groups.

    Args:
        model: that it trains.
        optimizer: over the parameters that it had when it was saved, in the same order.
        checkpoint: a complete `global_step_N`.

    Raises:
        UserError: the checkpoint has no optimizer or another one's.
    """
    files = ShardFiles(checkpoint, OPTIMIZER)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {name: own_state(saved, parameters[index]) for name, saved in entry.items()}
        for index, entry in saved_entries(model, optimizer, parameters, files).items()
    }
    own_groups, saved_groups = optimizer.state_dict()["param_groups"], files.content(0)["param_groups"]
    require_same_hyperparameters(saved_groups[0].keys(), own_groups[0].keys(), checkpoint)
    groups = [{**saved, "params": own["params"]} for saved, own in zip(saved_groups, own_groups)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def require_same_hyperparameters(saved: Set[str], own: Set[str], checkpoint: Path) -> None:
    """Refuse another optimizer's state where nothing names the optimizer, as in checkpoints of verl.

    Another version of the same optimizer may have lost hyperparameters or have new ones, but not both.

    Raises:
        UserError: it is another one's.
    """
    if saved - own and own - saved:
        names = f"with {', '.join(sorted(saved - own))}, but this run's has {', '.join(sorted(own - saved))} instead"
        raise another_optimizer(checkpoint, names)


def saved_entries(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], files: ShardFiles
) -> Entries:
    """What was saved of each parameter of the optimizer.

    Raises:
        UserError: it was another optimizer.
    """
    saved = files.content(0)
    sizes, saved_sizes = group_sizes(optimizer.param_groups), group_sizes(saved["param_groups"])
    entries: Entries | None = None
    if sizes == saved_sizes:
        entries = {index: whole_tensors(files, index) for index in saved["state"]}
    elif is_stock(files.directory) and len(sizes) == len(saved_sizes) == 1:
        entries = stock_entries(model, parameters, files, saved_sizes[0])
    if entries is None:
        raise UserError(
            f"the optimizer of {files.directory} has parameter groups of {saved_sizes} tensors, this run's of {sizes}; "
            "restore the optim and model sections of the configuration, or load only the weights, by "
            f"trainer.resume_from_path={files.directory} and trainer.checkpoint.load_contents=[model]"
        )
    return entries


def group_sizes(groups: list[dict[str, Any]]) -> list[int]:
    """Number of parameters in each group of an optimizer."""
    return [len(group["params"]) for group in groups]


def own_state(saved: SavedTensor, parameter: torch.Tensor) -> Any:
    """This rank's part of one state entry of a parameter, placed as the parameter is.

    Raises:
        UserError: an entry that each rank keeps for itself, saved by another number of ranks.
    """
    first = saved.piece(0)
    if not isinstance(first, torch.Tensor):
        return first
    if isinstance(first, DTensor) or isinstance(saved, FlatTensor):
        target = torch.empty_like(parameter, dtype=saved.dtype)
        saved.copy_rows(*rows_of(target), local_part(target))
        return target
    if first.numel() == 1:
        return first.clone()  # the step's count, the same on every rank
    if saved.files.world_size != dist.get_world_size():
        raise UserError(
            f"the optimizer keeps {'.'.join(map(str, saved.keys))} for each rank by itself, so {saved.files.directory} "
            f"resumes on its own number of ranks alone; start {saved.files.world_size} ranks"
        )
    return saved.piece(dist.get_rank()).clone()


def derived_seed(seed: int, step: int, stream: int) -> int:
    """Seed of a rank's random numbers after its number of ranks changed.

    A function of the run's seed, the step and the data-parallel rank, so that the same change gives the same numbers;
    those of the former ranks belong to none of the new ones.
    """
    return int(np.random.SeedSequence([seed, step, stream]).generate_state(1)[0])


def seed_anew(seed: int, step: int, stream: int) -> None:
    """Seed Python, NumPy and torch with `derived_seed`."""
    set_seed(derived_seed(seed, step, stream))
