"""Loads models: configuration, attention function, LoRA adapters, kernels and patches."""

from __future__ import annotations

import importlib
import json
import os
import stat
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from verl_ext.checkpoint.hf_tensors import unwrap_peft
from verl_ext.checkpoint.load import holds_model, read_data_state
from verl_ext.commands import require_optional_package
from verl_ext.config.provenance import package_versions
from verl_ext.config.schema import as_dict
from verl_ext.distributed import gather_results, on_every_rank, on_rank_zero
from verl_ext.errors import UserError, first_line_of, remedy_for
from verl_ext.model_files import caps_scores, load_pretrained_strict, require_capped_scores, require_no_remote_code
from verl_ext.trainer.config import ModelConfig
from verl_ext.trainer.device import pick_attention
from verl_ext.trainer.fsdp import shard
from verl_ext.trainer.stages import RunConfig
from verl_ext.verl_api import PrecisionType, apply_monkey_patch, convert_to_regular_types, copy_to_local

SHARED_MEMORY = Path("/dev/shm/verl-cache")
"""Directory in which verl looks for copies; it accepts any files with the same names and sizes."""
UNSUPPORTED_BY_FSDP = ("trainable_token_indices", "layer_replication")
"""Settings of peft whose parameters FSDP2 cannot shard: parts of a tensor, and layers that share their weights."""
ARGUMENTS = r"L\['(?!self)"
"""What torch.compile calls the arguments of a method, and what they contain; a regular expression."""


def build_model(
    config: RunConfig,
    device_mesh: DeviceMesh,
    precision: torch.dtype,
    before_sharding: Callable[[PreTrainedModel], None] = lambda model: None,
    checkpoint: Path | None = None,
) -> PreTrainedModel:
    """Load the model of `model.partial_pretrain`, add LoRA if configured, and shard it; collective.

    Args:
        before_sharding: called with the model before it is sharded.
        checkpoint: a checkpoint that the caller loads into the model next. If it replaces everything that the
            pretrained weights determine, they are not read, and the parameters are uninitialized.

    Returns:
        The model as FSDP2 modules; its parameters are DTensors of `model.fsdp_config.model_dtype`.

    Raises:
        UserError: the model cannot be loaded.
    """

    def unsharded(is_empty: bool) -> PreTrainedModel:
        model = on_every_rank(lambda: load_model(config, device_mesh, precision, is_empty=is_empty))
        patch_model(model, config)
        return on_every_rank(lambda: add_lora(model, config.model))

    is_empty = False
    if checkpoint is not None:
        # some models and adapters cannot be created without weights; all other errors occur again below
        with suppress(UserError, RuntimeError):
            empty = unsharded(is_empty=True)
            is_empty = on_rank_zero(lambda: can_fill(checkpoint, empty))
    model = empty if is_empty else unsharded(is_empty=False)
    if config.model.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before_sharding(model)
    return shard(model, config.model.fsdp_config, device_mesh, precision, is_empty=is_empty)


def can_fill(checkpoint: Path, model: PreTrainedModel | PeftModel) -> bool:
    """Whether loading a checkpoint into an empty model gives the same model as loading it over pretrained weights.

    It does not for quantized models, which are converted while their weights are read, nor if a buffer that
    checkpoints lack was computed from a parameter.
    """
    is_quantized = getattr(unwrap_peft(model).config, "quantization_config", None) is not None
    has_buffers = not any(buffer.is_meta for buffer in model.buffers())
    return has_buffers and not is_quantized and holds_model(checkpoint, model)


def forward_settings(config: RunConfig, device_name: str, precision: torch.dtype) -> str:
    """Return everything but the weights that decides whether a model packs samples and has the fused loss."""
    attention = pick_attention(config.model.attn_implementation, device_name, precision)
    config_file = Path(str(config.model.partial_pretrain)).expanduser() / "config.json"
    data = as_dict(config.data)
    return json.dumps(
        {
            "model": as_dict(config.model),
            "config.json": config_file.read_text() if config_file.is_file() else None,  # None: a name on the Hub
            "use_remove_padding": config.use_remove_padding,
            "data.packing": data.get("packing"),
            "max_length": [data.get(f"max_{part}length") for part in ("", "prompt_", "response_")],
            "sequence_parallel_size": config.sequence_parallel_size,
            "forward": [device_name, str(precision), attention],
            "packages": package_versions(),
        }
    )


def recorded_check(checkpoint: Path | None, settings: str) -> dict[str, Any] | None:
    """Return `PipelineTrainer.forward_check` of a checkpoint; None without one for these settings; collective."""
    if checkpoint is None:
        return None

    def read() -> dict[str, Any] | None:
        found = read_data_state(checkpoint).get("forward_check")  # verl's checkpoints do not have it
        return found if found and found["settings"] == settings else None

    found = gather_results(read)  # ranks on different machines may have different packages
    return found[0] if all(found) else None


def load_model_config(config: RunConfig) -> PretrainedConfig:
    """Load the model's configuration, with its context extended to `data.max_length` as in verl."""
    if config.model.external_lib is not None:
        importlib.import_module(config.model.external_lib)  # registers the user's architecture with transformers
    path = local_model_path(config)
    require_no_remote_code(path, config.model.trust_remote_code)
    model_config = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    if getattr(model_config, "max_position_embeddings", None):
        model_config.max_position_embeddings = max(model_config.max_position_embeddings, config.data.max_length)
    return model_config


def load_model(
    config: RunConfig,
    device_mesh: DeviceMesh,
    precision: torch.dtype,
    auto_class: Any = AutoModelForCausalLM,
    is_empty: bool = False,
) -> PreTrainedModel:
    """Load the unsharded model, with weights on rank 0 only; `shard` sends them to the other ranks.

    Args:
        auto_class: class of transformers that loads the model.
        is_empty: whether to create the same model with its parameters on the meta device; its buffers are real.

    Raises:
        UserError: the model cannot be loaded.
    """
    try:
        model_config = load_model_config(config)
        arguments: dict[str, Any] = {
            "dtype": PrecisionType.to_dtype(config.model.fsdp_config.model_dtype),
            "attn_implementation": attention_of(
                config.model, model_config, device_mesh.device_type, precision, auto_class
            ),
            "trust_remote_code": config.model.trust_remote_code,
        }
        # Tied weights are real on every rank, because `init_empty_weights` unties them.
        if not is_empty and (device_mesh.get_rank() == 0 or model_config.tie_word_embeddings):
            return load_pretrained_strict(auto_class, local_model_path(config), config=model_config, **arguments)
        with init_empty_weights(include_buffers=False):
            model = auto_class.from_config(model_config, **arguments)
        if is_empty:  # the rest of what `from_pretrained` does
            model.tie_weights()
            model.generation_config = generation_config_of(local_model_path(config))
            model.eval()
        return model
    except UserError:
        raise
    except Exception as error:  # damaged models may raise anything
        otherwise = "restore it, or specify another model"
        if "ignore_mismatched_sizes" in str(error):  # learned positions cannot be extended to data.max_length
            otherwise = f"if data.max_length exceeds the model's context, lower it; otherwise {otherwise}"
        first_line, remedy = first_line_of(error), remedy_for(error, otherwise)
        raise UserError(
            f"model.partial_pretrain={config.model.partial_pretrain} cannot be loaded ({first_line}); {remedy}"
        ) from error


def generation_config_of(path: str) -> GenerationConfig:
    """Read the generation settings as `from_pretrained` does: from their own file, or from the configuration."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return GenerationConfig.from_pretrained(path, config_file_name="config.json", _from_model_config=True)


def attention_of(
    config: ModelConfig, model_config: PretrainedConfig, device_name: str, precision: torch.dtype, auto_class: Any
) -> str:
    """Return the name of the attention function in transformers; auto selects one that the model supports.

    Raises:
        UserError: the configured function would ignore part of the model's attention.
    """
    setting = config.attn_implementation
    picked = pick_attention(setting, device_name, precision)
    require_capped_scores(setting, model_config)
    model_class = auto_class._model_mapping.get(type(model_config), None)  # None: the model ships its own code
    if setting != "auto" or model_class is None:
        return picked
    if picked == "flash_attention_2" and not model_class._supports_flash_attn:
        picked = "sdpa"
    return "eager" if picked == "sdpa" and (caps_scores(model_config) or not model_class._supports_sdpa) else picked


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile each transformer block in place, for micro-batches of any length.

    Only sizes of a block's arguments are dynamic. `dynamic=True` would also make integers of FSDP's modules dynamic,
    such as the size of a head, from which kernels would then compute the index of each element.
    """
    torch.compiler.config.dynamic_sources = ARGUMENTS
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            module.compile()


def disable_dropout(model: PreTrainedModel) -> None:
    """Disable dropout in training mode; the model's configuration does not change."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):  # a rate that is passed to attention
                setattr(module, name, 0.0)


def patch_model(model: PreTrainedModel, config: RunConfig) -> None:
    """Apply verl's patches for Ulysses and padding removal, and Liger's kernels, if configured."""
    if config.sequence_parallel_size > 1 or (config.use_remove_padding and not config.packs_samples):
        apply_monkey_patch(model=model, ulysses_sp_size=config.sequence_parallel_size)
    if config.model.use_liger:
        require_optional_package("liger-kernel", "model.use_liger=true", "model.use_liger=false")
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)


# LoRA


class LowRankScaledLinear(LoraLinear):
    """A linear layer with adapters that scales the hidden states of rank `lora_rank` instead of peft's full outputs."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the layer's output (..., out_features) for `x` (..., in_features)."""
        is_plain = not (self.disable_adapters or self.merged or self.lora_variant or any(self.lora_bias.values()))
        if not is_plain or args or kwargs:
            return super().forward(x, *args, **kwargs)
        result = self.base_layer(x)
        for name in self.active_adapters:
            if name in self.lora_A:
                low_rank = self.lora_A[name](self.lora_dropout[name](x))
                result = result + self.lora_B[name](low_rank * self.scaling[name])
        return result


def add_lora(model: PreTrainedModel, config: ModelConfig) -> PreTrainedModel | PeftModel:
    """Add new LoRA adapters (`lora_rank`) or those of `lora_adapter_path` to the model."""
    if not config.uses_lora:
        return model
    model.enable_input_require_grads()
    try:
        model = _with_adapters(model, config)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: adapters of a model with other sizes
        raise UserError(
            f"the LoRA adapters cannot be created: {first_line_of(error)}; correct model.target_modules, "
            "model.lora_rank or model.lora_adapter_path"
        ) from error
    for module in model.modules():
        if type(module) is LoraLinear:
            module.__class__ = LowRankScaledLinear
    return model.to(PrecisionType.to_dtype(config.fsdp_config.model_dtype))


def _with_adapters(model: PreTrainedModel, config: ModelConfig) -> PeftModel:
    if config.lora_adapter_path is not None:
        path = local_path(config.lora_adapter_path, config.use_shm)
        given = PeftConfig.from_pretrained(path)
        for name in UNSUPPORTED_BY_FSDP:
            if getattr(given, name, None):  # other kinds of adapters do not have it
                raise UserError(
                    f"model.lora_adapter_path={config.lora_adapter_path} was trained with {name}, which sharded "
                    "training does not support; specify adapters without it"
                )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"for .* which is a no-op")  # the model is on the meta device
            return PeftModel.from_pretrained(model, path, is_trainable=True)
    lora = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=convert_to_regular_types(config.target_modules),
        bias="none",
    )
    with warnings.catch_warnings():
        # peft searches for experts among the modules, but finds them among the parameters
        warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys")
        return get_peft_model(model, lora)


# Paths


def local_model_path(config: RunConfig) -> str:
    """Return `model.partial_pretrain` as a local directory, copied with `model.use_shm`, or as a Hub name."""
    return local_path(str(Path(str(config.model.partial_pretrain)).expanduser()), config.model.use_shm)


def local_path(path: str, use_shm: bool) -> str:
    """Return a local directory or a Hub name; with `use_shm`, a copy in shared memory.

    Raises:
        UserError: another user could have put the copy there.
    """
    if use_shm:
        require_own(SHARED_MEMORY)
    return copy_to_local(path, use_shm=use_shm)


def require_own(directory: Path) -> None:
    """Create a directory that only this user can write to, unless it exists.

    Raises:
        UserError: other users can write to the directory.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    if not is_own:
        raise UserError(f"other users may write into {directory}; remove it, or set model.use_shm=false")
