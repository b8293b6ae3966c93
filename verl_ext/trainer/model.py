"""Loads a causal language model and shards it with FSDP2, from verl's own parts."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from omegaconf import DictConfig
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from verl.utils.fsdp_utils import apply_fsdp2, fsdp2_load_full_state_dict
from verl.utils.torch_dtypes import PrecisionType

from verl_ext.collective import on_every_rank
from verl_ext.errors import UserError, first_line_of
from verl_ext.model_code import require_no_code
from verl_ext.trainer.hardware import packs_samples, pick_attention, pick_precision
from verl_ext.trainer.local_path import local_path
from verl_ext.trainer.lora import add_lora


def build_model(
    config: DictConfig,
    device_mesh: DeviceMesh,
    device_name: str,
    before_sharding: Callable[[PreTrainedModel], None] = lambda model: None,
) -> PreTrainedModel:
    """The model of `model.partial_pretrain`, with LoRA where asked for, sharded over `device_mesh`.

    Args:
        config: the resolved configuration.
        device_mesh: one-dimensional mesh over all ranks.
        device_name: cuda, npu or cpu.
        before_sharding: is given the model while its parameters are whole.

    Returns:
        The model as FSDP2 modules, its parameters DTensors in `model.fsdp_config.model_dtype`.

    Raises:
        UserError: a model that cannot be loaded.
    """
    model = on_every_rank(lambda: load_model(config, device_mesh, device_name))
    patch_model(model, config)
    model = on_every_rank(lambda: add_lora(model, config))
    if config.model.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before_sharding(model)
    return shard(model, config, device_mesh, device_name)


def load_model_config(config: DictConfig) -> PretrainedConfig:
    """The model's own configuration, its context stretched to `data.max_length` as verl does."""
    if config.model.external_lib is not None:
        importlib.import_module(config.model.external_lib)  # registers the user's architecture with transformers
    path = local_model_path(config)
    require_no_code(path, config.model.trust_remote_code)
    model_config = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    if getattr(model_config, "max_position_embeddings", None):
        model_config.max_position_embeddings = max(model_config.max_position_embeddings, config.data.max_length)
    return model_config


def local_model_path(config: DictConfig) -> str:
    """`model.partial_pretrain` as a local directory or a hub name, in shared memory with `model.use_shm`."""
    return local_path(str(Path(config.model.partial_pretrain).expanduser()), config.model.use_shm)


def load_model(
    config: DictConfig, device_mesh: DeviceMesh, device_name: str, auto_class: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """The unsharded model: real weights on rank 0, no memory on the others, which receive theirs when it is sharded."""
    arguments: dict[str, Any] = {
        "dtype": PrecisionType.to_dtype(config.model.fsdp_config.model_dtype),
        "attn_implementation": attention_of(config, device_name),
        "trust_remote_code": config.model.trust_remote_code,
    }
    try:
        model_config = load_model_config(config)
        # Tied weights must be real everywhere: two meta tensors that are one parameter come apart on materialising.
        if device_mesh.get_rank() == 0 or model_config.tie_word_embeddings:
            return auto_class.from_pretrained(local_model_path(config), config=model_config, **arguments)
        with init_empty_weights(include_buffers=False):
            return auto_class.from_config(model_config, **arguments)
    except Exception as error:  # each part of a damaged model raises an exception of its own kind
        first_line = first_line_of(error)
        raise UserError(
            f"model.partial_pretrain={config.model.partial_pretrain} cannot be loaded ({first_line}); restore it, "
            "or name another model"
        ) from error


def attention_of(config: DictConfig, device_name: str) -> str:
    """Name of the attention function among those of transformers."""
    precision = pick_precision(config.model.mixed_precision, device_name)
    picked = pick_attention(config.model.attn_implementation, device_name, precision)
    if packs_samples(config) and picked == "sdpa":
        from verl_ext.trainer.packed_attention import PACKED_SDPA

        return PACKED_SDPA
    return picked


def compile_blocks(model: PreTrainedModel) -> None:
    """Have each transformer block run compiled, in place; lengths differ between micro-batches, so with any."""
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            module.compile(dynamic=True)


def disable_dropout(model: PreTrainedModel) -> None:
    """Have forward passes in training mode leave nothing out; the model's configuration stays what it is."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):  # a share that attention is called with
                setattr(module, name, 0.0)


def patch_model(model: PreTrainedModel, config: DictConfig) -> None:
    """Apply verl's patches for Ulysses and padding removal, and Liger's kernels, where the configuration asks."""
    if config.ulysses_sequence_parallel_size > 1 or (config.use_remove_padding and not packs_samples(config)):
        from verl.models.transformers.monkey_patch import apply_monkey_patch

        apply_monkey_patch(model=model, ulysses_sp_size=config.ulysses_sequence_parallel_size)
    if config.model.use_liger:
        if importlib.util.find_spec("liger_kernel") is None:
            raise UserError("model.use_liger=true needs the liger-kernel package; install it, or set it to false")
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)


def shard(model: PreTrainedModel, config: DictConfig, device_mesh: DeviceMesh, device_name: str) -> PreTrainedModel:
    """Shard in place with FSDP2 and send rank 0's weights to all ranks."""
    precision = pick_precision(config.model.mixed_precision, device_name)
    offload = CPUOffloadPolicy(pin_memory=device_name != "cpu") if config.model.fsdp_config.cpu_offload else None
    arguments: dict[str, Any] = {"mesh": device_mesh, "reshard_after_forward": True}
    if precision != torch.float32:
        arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    if offload is not None:
        arguments["offload_policy"] = offload
    full_state = model.state_dict()
    apply_fsdp2(model, arguments, config.model.fsdp_config)
    fsdp2_load_full_state_dict(model, full_state, device_mesh, offload)
    return model
