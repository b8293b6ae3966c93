"""Shards models with FSDP2, and decides whether weights stay gathered between micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from transformers import PreTrainedModel

from verl_ext.distributed import gather_results, local_world_size
from verl_ext.errors import UserError
from verl_ext.hardware import process_memory
from verl_ext.trainer.config import BYTES_OF_GRADIENT, GATHERED_SHARE, FSDPConfig, GatheringFSDPConfig
from verl_ext.verl_api import PrecisionType, apply_fsdp2, fsdp2_load_full_state_dict


def shard(
    model: PreTrainedModel,
    config: FSDPConfig,
    device_mesh: DeviceMesh,
    precision: torch.dtype,
    is_empty: bool = False,
) -> PreTrainedModel:
    """Shard a model in place with FSDP2 and send rank 0's weights to all ranks.

    Args:
        model: the model; only rank 0 needs its weights.
        device_mesh: one-dimensional mesh over all ranks.
        precision: dtype of the forward pass; gradients are reduced in fp32.
        is_empty: whether no rank has weights, because a checkpoint is loaded next; the parameters are uninitialized.

    Raises:
        UserError: see `layer_classes`; on every rank.
    """
    offload = CPUOffloadPolicy(pin_memory=device_mesh.device_type != "cpu") if config.cpu_offload else None
    arguments: dict[str, Any] = {"mesh": device_mesh, "reshard_after_forward": True}
    if {precision, PrecisionType.to_dtype(config.model_dtype)} != {torch.float32}:
        arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    if offload is not None:
        arguments["offload_policy"] = offload
    full_state = {} if is_empty else model.state_dict()
    layers = layer_classes(model, config.wrap_policy.transformer_layer_cls_to_wrap)
    apply_fsdp2(model, arguments, {"wrap_policy": {"transformer_layer_cls_to_wrap": layers}})
    if is_empty:
        allocate_parameters(model, device_mesh.device_type if offload is None else "cpu")
    else:
        fsdp2_load_full_state_dict(model, full_state, device_mesh, offload)
    return model


def allocate_parameters(model: torch.nn.Module, device_name: str) -> None:
    """Give the parameters of a sharded model on the meta device uninitialized memory; tied ones stay tied."""
    modules = list(model.modules())
    buffers = [(each, name, buffer) for each in modules for name, buffer in each.named_buffers("", False, False)]
    model.to_empty(device=device_name)  # also discards the values of buffers
    for module, name, buffer in buffers:
        setattr(module, name, buffer)


def layer_classes(model: PreTrainedModel, configured: Any) -> list[str]:
    """Return the names of the classes whose modules FSDP2 shards separately.

    A module inside another sharded module is part of the outer one: verl's `apply_fsdp2` shards the outer one first,
    and FSDP2 does not accept a parameter twice. Mamba's layers have such modules.

    Args:
        model: the unsharded model.
        configured: `wrap_policy.transformer_layer_cls_to_wrap`, a name or a list of names; None uses the model's own.

    Raises:
        UserError: the model has no such module.
    """
    key = "model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"
    names = [configured] if isinstance(configured, str) else list(configured or model._no_split_modules or ())
    chosen = {name: type(module).__name__ for name, module in model.named_modules() if type(module).__name__ in names}
    outermost = {kind for name, kind in chosen.items() if not any(name.startswith(f"{outer}.") for outer in chosen)}
    missing = sorted({*names} - {*chosen.values()}) if configured else []
    if missing or not outermost:
        what = f"has no module of the class {missing[0]}" if missing else "does not name the layers to shard separately"
        lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
        guess = f", probably {type(max(lists, key=len)[0]).__name__}" if lists else ""
        raise UserError(f"{type(model).__name__} {what}; set {key} to the class of its layers{guess}")
    return sorted(outermost)


class FSDPReshardPolicy:
    """Gathers weights and reduces gradients only once per update if memory allows.

    Otherwise each micro-batch gathers every block twice and reduces its gradients.

    Args:
        model: the model, sharded with FSDP2.
        keeps_gathered: whether weights and gradients stay unsharded between micro-batches.
    """

    def __init__(self, model: Any, keeps_gathered: bool) -> None:
        self._model, self.keeps_gathered = model, keeps_gathered
        model.set_reshard_after_forward(not keeps_gathered)

    @classmethod
    def of_config(
        cls, config: FSDPConfig, model: torch.nn.Module, precision: torch.dtype, device_name: str
    ) -> FSDPReshardPolicy:
        """Create the policy of `model.fsdp_config`; collective.

        Models without `keep_gathered` are too small for it to matter.
        """
        if not isinstance(config, GatheringFSDPConfig):
            return cls(model, keeps_gathered=False)
        # all ranks must do the same, but those of different machines may differ in memory
        found = gather_results(lambda: keeps_gathered(config, model, precision, device_name))
        return cls(model, all(found))

    def before_micro_batch(self, is_last: bool) -> None:
        """Configure resharding and reduction for the next forward and backward pass.

        Gathered weights stay gathered until the backward pass of the last micro-batch, or until `reshard`.
        """
        if self.keeps_gathered:
            self._model.set_reshard_after_forward(False)  # generation by the model itself sets it to true
            self._model.set_requires_gradient_sync(is_last)
            self._model.set_reshard_after_backward(is_last)

    def reshard(self) -> None:
        """Shard weights that are still gathered after forward passes without a backward pass."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def keeps_gathered(
    config: GatheringFSDPConfig, model: torch.nn.Module, precision: torch.dtype, device_name: str
) -> bool:
    """Resolve `model.fsdp_config.keep_gathered`: auto is true if this needs a small fraction of the memory.

    Args:
        model: the model, sharded or not.
        precision: dtype of the forward pass, and therefore of gathered weights.
    """
    if config.keep_gathered != "auto":
        return config.keep_gathered
    weights = sum(parameter.numel() for parameter in model.parameters()) * precision.itemsize
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return weights + trained * BYTES_OF_GRADIENT <= GATHERED_SHARE * _memory_of_rank(device_name)


def _memory_of_rank(device_name: str) -> float:
    """This rank's share of its machine's memory, in bytes."""
    if device_name == "cpu":
        return process_memory().total / local_world_size()
    return float(getattr(torch, device_name).get_device_properties(0).total_memory)
