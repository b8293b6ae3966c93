"""Loads a causal language model and shards it with FSDP2, from verl's own parts."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from verl.utils.fsdp_utils import apply_fsdp2, fsdp2_load_full_state_dict
from verl.utils.torch_dtypes import PrecisionType

from verl_ext.distributed import on_every_rank
from verl_ext.errors import UserError, first_line_of
from verl_ext.model_files import load_whole
from verl_ext.remote_code import require_no_remote_code
from verl_ext.trainer.hardware import packs_samples, pick_attention, pick_precision
from verl_ext.trainer.local_path import local_path
from verl_ext.trainer.lora import add_lora
from verl_ext.trainer.stages import RunConfig


def build_model(
    config: RunConfig,
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


def load_model_config(config: RunConfig) -> PretrainedConfig:
    """The model's own configuration, its context stretched to `data.max_length` as verl does."""
    if config.model.external_lib is not None:
        importlib.import_module(config.model.external_lib)  # registers the user's architecture with transformers
    path = local_model_path(config)
    require_no_remote_code(path, config.model.trust_remote_code)
    model_config = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    if getattr(model_config, "max_position_embeddings", None):
        model_config.max_position_embeddings = max(model_config.max_position_embeddings, config.data.max_length)
    return model_config


def local_model_path(config: RunConfig) -> str:
    """`model.partial_pretrain` as a local directory or a hub name, in shared memory with `model.use_shm`."""
    return local_path(str(Path(str(config.model.partial_pretrain)).expanduser()), config.model.use_shm)


def load_model(
    config: RunConfig, device_mesh: DeviceMesh, device_name: str, auto_class: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """The unsharded model: real weights on rank 0, no memory on the others, which receive theirs when it is sharded."""
    try:
        model_config = load_model_config(config)
        arguments: dict[str, Any] = {
            "dtype": PrecisionType.to_dtype(config.model.fsdp_config.model_dtype),
            "attn_implementation": attention_of(config, model_config, device_name, auto_class),
            "trust_remote_code": config.model.trust_remote_code,
        }
        # Tied weights must be real everywhere: two meta tensors that are one parameter come apart on materialising.
        if device_mesh.get_rank() == 0 or model_config.tie_word_embeddings:
            return load_whole(auto_class, local_model_path(config), config=model_config, **arguments)
        with init_empty_weights(include_buffers=False):
            return auto_class.from_config(model_config, **arguments)
    except UserError:
        raise
    except Exception as error:  # each part of a damaged model raises an exception of its own kind
        first_line = first_line_of(error)
        raise UserError(
            f"model.partial_pretrain={config.model.partial_pretrain} cannot be loaded ({first_line}); restore it, "
            "or name another model"
        ) from error


def attention_of(config: RunConfig, model_config: PretrainedConfig, device_name: str, auto_class: Any) -> str:
    """Name of the attention function among those of transformers; auto takes one that the model supports.

    Raises:
        UserError: the configured function would ignore a part of the model's attention.
    """
    setting, precision = config.model.attn_implementation, pick_precision(config.model.mixed_precision, device_name)
    picked = pick_attention(setting, device_name, precision)
    caps_scores = getattr(model_config.get_text_config(), "attn_logit_softcapping", None) is not None
    if setting == "sdpa" and caps_scores:  # transformers runs it without the cap, and only warns
        raise UserError(
            f"model.attn_implementation=sdpa cannot cap attention scores, which {model_config.model_type} models do; "
            "set it to auto or eager"
        )
    model_class = auto_class._model_mapping.get(type(model_config), None)  # None: the model brings its own code
    if setting != "auto" or model_class is None:
        return picked
    if picked == "flash_attention_2" and not model_class._supports_flash_attn:
        picked = "sdpa"
    return "eager" if picked == "sdpa" and (caps_scores or not model_class._supports_sdpa) else picked


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


def patch_model(model: PreTrainedModel, config: RunConfig) -> None:
    """Apply verl's patches for Ulysses and padding removal, and Liger's kernels, where the configuration asks."""
    if config.sequence_parallel_size > 1 or (config.use_remove_padding and not packs_samples(config)):
        from verl.models.transformers.monkey_patch import apply_monkey_patch

        apply_monkey_patch(model=model, ulysses_sp_size=config.sequence_parallel_size)
    if config.model.use_liger:
        if importlib.util.find_spec("liger_kernel") is None:
            raise UserError("model.use_liger=true needs the liger-kernel package; install it, or set it to false")
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)


def shard(model: PreTrainedModel, config: RunConfig, device_mesh: DeviceMesh, device_name: str) -> PreTrainedModel:
    """Shard in place with FSDP2 and send rank 0's weights to all ranks.

    Raises:
        UserError: see `layer_classes`; on every rank alike.
    """
    precision = pick_precision(config.model.mixed_precision, device_name)
    offload = CPUOffloadPolicy(pin_memory=device_name != "cpu") if config.model.fsdp_config.cpu_offload else None
    arguments: dict[str, Any] = {"mesh": device_mesh, "reshard_after_forward": True}
    if precision != torch.float32:
        arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    if offload is not None:
        arguments["offload_policy"] = offload
    full_state = model.state_dict()
    layers = layer_classes(model, config.model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap)
    apply_fsdp2(model, arguments, {"wrap_policy": {"transformer_layer_cls_to_wrap": layers}})
    fsdp2_load_full_state_dict(model, full_state, device_mesh, offload)
    return model


def layer_classes(model: PreTrainedModel, configured: Any) -> list[str]:
    """Names of the classes whose modules FSDP2 shards one by one.

    A module inside another one that is sharded is left to that one: verl's `apply_fsdp2` shards the outer one first,
    and FSDP2 takes no parameter twice. The layers of Mamba have such modules.

    Args:
        model: before it is sharded.
        configured: `wrap_policy.transformer_layer_cls_to_wrap`, a name or a list of names; None takes the model's own.

    Raises:
        UserError: there is no such module in the model.
    """
    key = "model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"
    names = [configured] if isinstance(configured, str) else list(configured or model._no_split_modules or ())
    chosen = {name: type(module).__name__ for name, module in model.named_modules() if type(module).__name__ in names}
    outermost = {kind for name, kind in chosen.items() if not any(name.startswith(f"{outer}.") for outer in chosen)}
    missing = sorted({*names} - {*chosen.values()}) if configured else []
    if missing or not outermost:
        what = f"has no module of the class {missing[0]}" if missing else "does not name the layers to shard one by one"
        lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
        guess = f", probably {type(max(lists, key=len)[0]).__name__}" if lists else ""
        raise UserError(f"{type(model).__name__} {what}; set {key} to the class of its layers{guess}")
    return sorted(outermost)
