"""Loads this rank's part of the model and the optimizer from a checkpoint of any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verl_ext.checkpoint.hf_tensors import adapters_of, exported_tensors, plan_to_json, read_plan, unwrap_peft
from verl_ext.checkpoint.manifest import DATA_STATE, EXPORT, MODEL, OPTIMIZER, PLAN, is_verl_checkpoint
from verl_ext.checkpoint.resume import another_optimizer
from verl_ext.checkpoint.shards import SavedTensor, ShardFiles
from verl_ext.distributed import local_rows, to_local
from verl_ext.errors import UserError
from verl_ext.files import parse_json

ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
"""Matches the name of a tensor that belongs to a single expert of a mixture-of-experts layer."""
OWN_HYPERPARAMETERS = (
    "lr", "initial_lr", "betas", "weight_decay", "fused", "foreach", "capturable", "differentiable",
)  # fmt: skip
"""Hyperparameters of any optimizer whose values in this run apply, not the saved ones: `optim`, choices of a kernel."""
STATE_CHOICES = ("amsgrad", "centered", "momentum")
"""Hyperparameters that add a tensor to the state of each parameter, unless they are 0 or False."""
ARCHITECTURE = (
    "model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "hidden_activation",
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_parameters", "partial_rotary_factor",
    "sliding_window", "layer_types", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar",
    "num_experts_per_tok", "norm_topk_prob",
)  # fmt: skip
"""Keys of a text model's configuration that change its function, but not the shapes of its tensors."""
OptimizerState = dict[int, dict[str, SavedTensor]]
"""Saved state by the parameter's index in the optimizer, then by name."""


def read_data_state(checkpoint: Path) -> dict[str, Any]:
    """The data position saved with a checkpoint; empty if verl was killed before writing it."""
    path = checkpoint / DATA_STATE
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {}


# The model


def holds_model(checkpoint: Path, model: PreTrainedModel | PeftModel) -> bool:
    """Whether `load_model` overwrites every parameter, and the checkpoint was saved from the same model.

    The dtypes of some parameters, and the names of exported tensors, depend on the files that a model was loaded from.
    They must be those of a model that was not loaded from files.

    Args:
        model: the unsharded model; its parameters may be on the meta device.
    """
    plan, state = checkpoint / PLAN, model.state_dict()
    if not plan.is_file() or not state.keys() >= {name for name, _ in model.named_parameters()}:
        return False
    saved = ShardFiles(checkpoint, MODEL).content(0)
    kinds = [{name: (tensor.shape, tensor.dtype) for name, tensor in each.items()} for each in (saved, state)]
    return kinds[0] == kinds[1] and plan.read_text() == plan_to_json(exported_tensors(model))


@torch.no_grad()
def load_model(model: torch.nn.Module, checkpoint: Path) -> None:
    """Load this rank's rows of every tensor into a model sharded with FSDP2, one tensor at a time.

    Raises:
        UserError: the checkpoint belongs to another model.
    """
    files = ShardFiles(checkpoint, MODEL)
    state = model.state_dict()
    _require_same_names(set(files.content(0)), set(state), checkpoint)
    _require_same_architecture(model, checkpoint)
    _require_same_scaling(model, files)
    for name, tensor in state.items():
        saved = files.tensor(name)
        if saved.shape != tensor.shape:
            raise another_model(checkpoint, name, tuple(saved.shape), tuple(tensor.shape))
        if torch.promote_types(saved.dtype, tensor.dtype) != tensor.dtype:
            raise UserError(
                f"{checkpoint} holds {name} in {saved.dtype}, but this run's weights are {tensor.dtype}, which cannot "
                "represent all of its values; restore model.fsdp_config.model_dtype"
            )
        saved.copy_rows(*local_rows(tensor), to_local(tensor))


def another_model(checkpoint: Path, what: str, saved: object, own: object) -> UserError:
    """The error for a checkpoint of a model that differs in `what`."""
    return UserError(
        f"{checkpoint} belongs to another model: its {what} is {saved}, this run's is {own}; restore the model's "
        "configuration or set another trainer.experiment_name"
    )


def _require_same_architecture(model: torch.nn.Module, checkpoint: Path) -> None:
    """Refuse another model whose tensors have the same names and shapes."""
    path = checkpoint / EXPORT / "config.json"
    if not isinstance(model, PreTrainedModel | PeftModel) or not path.is_file():
        return
    own = unwrap_peft(model).config
    try:
        saved = type(own).from_dict(parse_json(path.read_bytes()))
    except (OSError, ValueError, TypeError):  # the export is damaged, and does not matter for resuming
        return
    texts = [config.get_text_config().to_dict() for config in (saved, own)]
    for name in ARCHITECTURE:
        if (values := [each.get(name) for each in texts])[0] != values[1]:
            raise another_model(checkpoint, name, *values)


def _require_same_scaling(model: torch.nn.Module, files: ShardFiles) -> None:
    """Refuse another scaling of LoRA adapters: the same weights would be another model."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    if not layers or not (files.directory / PLAN).is_file():
        return
    own = adapters_of(layers, model.state_dict())
    for tensor in read_plan(files.directory, files.content(0)):
        saved = tensor.adapter
        if saved is not None and tensor.source in own and saved.scaling != own[tensor.source].scaling:
            raise another_model(
                files.directory, "LoRA scaling (model.lora_alpha / model.lora_rank)", saved.scaling,
                own[tensor.source].scaling,
            )  # fmt: skip


def _require_same_names(saved: set[str], expected: set[str], checkpoint: Path) -> None:
    if saved == expected:
        return
    if any(ONE_EXPERT.search(name) for name in saved - expected):
        raise UserError(
            f"{checkpoint} has a tensor for each expert, as in transformers 4; the installed release has one tensor "
            "for all experts of a layer, so the optimizer state does not fit. Start another run from the weights with "
            f"model.partial_pretrain={checkpoint / EXPORT} and another trainer.experiment_name"
        )
    missing, extra = sorted(expected - saved), sorted(saved - expected)
    difference = f"it lacks {missing[0]}" if missing else f"it has {extra[0]}, which this run does not have"
    raise UserError(
        f"{checkpoint} belongs to another model: {difference} ({len(missing)} tensors missing, {len(extra)} extra); "
        "restore the model section of the configuration or set another trainer.experiment_name"
    )


# The optimizer


@torch.no_grad()
def load_optimizer(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, checkpoint: Path, configured: Collection[str] = ()
) -> None:
    """Load the optimizer's parameter groups and this rank's rows of its state.

    This run's hyperparameters apply. An optimizer from outside torch may keep state among them, such as a step count,
    so there only those apply that the configuration sets.

    Args:
        model: the model that the optimizer trains.
        optimizer: optimizer with the same parameters in the same order as the saved one.
        checkpoint: a complete `global_step_N`.
        configured: names of hyperparameters that `optim.override_optimizer_config` sets.

    Raises:
        UserError: the checkpoint has no optimizer state, or the state of another optimizer.
    """
    files = ShardFiles(checkpoint, OPTIMIZER)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {name: _local_state(saved, parameters[index]) for name, saved in entry.items()}
        for index, entry in _saved_state(model, optimizer, parameters, files).items()
    }
    own_groups, saved_groups = optimizer.state_dict()["param_groups"], files.content(0)["param_groups"]
    # verl's checkpoints do not name their optimizer. Another version of the same optimizer may have dropped or added
    # hyperparameters, but not both.
    dropped, added = saved_groups[0].keys() - own_groups[0].keys(), own_groups[0].keys() - saved_groups[0].keys()
    if dropped and added:
        names = f"with {', '.join(sorted(dropped))}, but this run's has {', '.join(sorted(added))} instead"
        raise another_optimizer(checkpoint, names)
    for name in STATE_CHOICES:
        values = [groups[0].get(name) for groups in (saved_groups, own_groups)]
        if None not in values and bool(values[0]) != bool(values[1]):
            raise another_optimizer(checkpoint, f"with {name}={values[0]}, but this run's has {name}={values[1]}")
    is_torch = type(optimizer).__module__.startswith("torch.optim")
    names_of_own = [*own_groups[0]] if is_torch else ["params", *OWN_HYPERPARAMETERS, *configured]
    own_parts = [{key: own[key] for key in names_of_own if key in own} for own in own_groups]
    groups = [{**saved, **own} for saved, own in zip(saved_groups, own_parts)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _saved_state(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], files: ShardFiles
) -> OptimizerState:
    """The saved state of the optimizer's parameters; refuses a state of other parameters."""
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
            f"the optimizer of {files.directory} has parameter groups of {saved_sizes} tensors, not of {sizes}; "
            "restore the optim and model sections of the configuration, or load only the weights with "
            f"trainer.resume_from_path={files.directory} and trainer.checkpoint.load_contents=[model]"
        )
    return state


def _tensors_at(files: ShardFiles, index: int) -> dict[str, SavedTensor]:
    """The saved state of a parameter by name; empty for a frozen parameter."""
    return {name: files.tensor("state", index, name) for name in files.content(0)["state"].get(index, ())}


def _local_state(saved: SavedTensor, parameter: torch.Tensor) -> Any:
    """This rank's part of one entry of a parameter's state, with the parameter's placement."""
    first = saved.piece(0)
    if not isinstance(first, torch.Tensor):
        return first
    if isinstance(first, DTensor) or isinstance(saved, FlatParameterSlice):
        target = torch.empty_like(parameter, dtype=saved.dtype)
        saved.copy_rows(*local_rows(target), to_local(target))
        return target
    if first.numel() == 1:
        return first.clone()  # the step count, equal on every rank
    if saved.files.world_size != dist.get_world_size():
        raise UserError(
            f"the optimizer keeps {'.'.join(map(str, saved.keys))} separately on each rank, so {saved.files.directory} "
            f"resumes only on the same number of ranks; start {saved.files.world_size} ranks"
        )
    return saved.piece(dist.get_rank()).clone()


# Optimizers that verl saved
#
# verl's optimizer also has the frozen parameters. With FSDP1, it has one flat parameter for each unit: the unit's
# tensors concatenated to a vector and split evenly over the ranks. Each block is a unit, and so is everything outside
# the blocks.


class FlatParameterSlice(SavedTensor):
    """A tensor that starts at element `offset` of the flat parameter of an FSDP1 unit."""

    def __init__(self, files: ShardFiles, keys: tuple, offset: int, shape: torch.Size) -> None:
        super().__init__(files, keys)
        self.offset, self._shape = offset, shape

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self._shape

    def copy_rows(self, start: int, end: int, target: torch.Tensor) -> None:
        row_numel, piece_numel = self._shape[1:].numel(), self.piece(0).numel()
        first, last = self.offset + start * row_numel, self.offset + end * row_numel
        for rank in range(first // piece_numel, -(-last // piece_numel)):
            low, high = max(first, rank * piece_numel), min(last, (rank + 1) * piece_numel)
            values = self.piece(rank)[low - rank * piece_numel : high - rank * piece_numel]
            target.view(-1)[low - first : high - first].copy_(values)


def _verl_state(
    model: PreTrainedModel, trained: Sequence[torch.Tensor], files: ShardFiles, num_saved: int
) -> OptimizerState | None:
    """The state of the trained parameters in a checkpoint of verl's optimizer, which has one group.

    Args:
        model: model sharded with FSDP2.
        trained: parameters of this run's optimizer, in its order.
        files: optimizer shards that verl saved.
        num_saved: number of parameters of verl's optimizer.

    Returns:
        The state by index in `trained`; None if verl's optimizer had other parameters.
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
    """The parameters of each FSDP1 unit, in the order of verl's optimizer."""
    classes = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if classes & {base.__name__ for base in type(module).__mro__}]
    unit_of = {id(parameter): index for index, block in enumerate(blocks, start=1) for parameter in block.parameters()}
    units: list[list[torch.Tensor]] = [[] for _ in range(len(blocks) + 1)]
    for parameter in model.parameters():
        units[unit_of.get(id(parameter), 0)].append(parameter)
    return units


def _fits(files: ShardFiles, index: int, unit: Sequence[torch.Tensor]) -> bool:
    """Whether the pieces of a flat parameter have the length that the unit's tensors require."""
    length = sum(parameter.numel() for parameter in unit)
    pieces = [value for value in files.content(0)["state"].get(index, {}).values() if value.dim()]
    return all(piece.dim() == 1 and piece.numel() == -(-length // files.world_size) for piece in pieces)


def _unit_state(
    files: ShardFiles, index: int, unit: Sequence[torch.Tensor]
) -> list[tuple[int, dict[str, SavedTensor]]]:
    """The id of each parameter of a unit, with its saved state by name."""
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


def derived_seed(seed: int, step: int, dp_rank: int) -> int:
    """Random seed of a rank after the number of ranks changed, since the saved states belong to the old ranks.

    It depends only on the run's seed, the step and the data-parallel rank, so the same change is reproducible.
    """
    return int(np.random.SeedSequence([seed, step, dp_rank]).generate_state(1)[0])
