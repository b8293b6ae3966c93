"""Trains adapters instead of the whole model."""

from __future__ import annotations

import warnings

from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import PreTrainedModel
from verl.utils.py_functional import convert_to_regular_types
from verl.utils.torch_dtypes import PrecisionType

from verl_ext.errors import UserError, first_line_of
from verl_ext.trainer.local_path import local_path
from verl_ext.trainer.stages import RunConfig


def uses_lora(config: RunConfig) -> bool:
    """Whether adapters are trained instead of the whole model."""
    return config.model.lora_adapter_path is not None or config.model.lora_rank > 0


def add_lora(model: PreTrainedModel, config: RunConfig) -> PreTrainedModel | PeftModel:
    """Wrap the model in new LoRA adapters (`lora_rank`) or in those of `lora_adapter_path`."""
    if not uses_lora(config):
        return model
    model.enable_input_require_grads()
    try:
        model = wrap_in_adapters(model, config)
    except (ValueError, OSError) as error:
        raise UserError(
            f"the LoRA adapters cannot be made: {first_line_of(error)}; correct model.target_modules, "
            "model.lora_rank or model.lora_adapter_path"
        ) from error
    return model.to(PrecisionType.to_dtype(config.model.fsdp_config.model_dtype))


def wrap_in_adapters(model: PreTrainedModel, config: RunConfig) -> PeftModel:
    """New adapters, or those that `lora_adapter_path` holds."""
    path = config.model.lora_adapter_path
    if path is not None:
        return PeftModel.from_pretrained(model, local_path(path, config.model.use_shm), is_trainable=True)
    lora = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=config.model.lora_rank,
        lora_alpha=config.model.lora_alpha,
        target_modules=convert_to_regular_types(config.model.target_modules),
        bias="none",
    )
    with warnings.catch_warnings():
        # peft looks for the ranks that it gives to experts among the modules, and finds them among the parameters
        warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys")
        return get_peft_model(model, lora)
