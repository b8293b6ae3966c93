"""What "auto" means on the device at hand: the attention kernel and the number type of the forward pass."""

from __future__ import annotations

import resource
from contextlib import nullcontext
from typing import Any

import torch
from omegaconf import DictConfig
from transformers.utils import is_flash_attn_2_available
from verl.utils.torch_dtypes import PrecisionType

from verl_ext.errors import UserError

GIB = 1 << 30


def pick_attention(setting: str, device_name: str, precision: torch.dtype) -> str:
    """`model.attn_implementation` with auto resolved: flash-attention where it can run, else sdpa.

    Args:
        setting: the configured value.
        device_name: cuda, npu or cpu.
        precision: type of the forward pass; flash-attention has no fp32.
    """
    can_flash = device_name == "cuda" and precision != torch.float32 and is_flash_attn_2_available()
    if setting == "auto":
        return "flash_attention_2" if can_flash else "sdpa"
    if setting == "flash_attention_2" and not can_flash:
        raise UserError(
            "model.attn_implementation=flash_attention_2 needs a GPU, the flash-attn package and bf16; "
            "install it and set model.mixed_precision=bf16, or take auto"
        )
    return setting


def pick_precision(setting: str, device_name: str) -> torch.dtype:
    """`model.mixed_precision` with auto resolved: bf16 on accelerators that have it, fp32 elsewhere.

    Which CPUs compute in bf16 is settled in `precision.py`: without bf16 units autocast doubles the step time.
    """
    if setting == "auto":
        has_bf16 = device_name == "npu" or (
            device_name == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        )
        return torch.bfloat16 if has_bf16 else torch.float32
    return PrecisionType.to_dtype(setting)


def packs_samples(config: DictConfig) -> bool:
    """Whether samples are packed into rows, as far as the configuration decides.

    With Ulysses verl's own forward pass takes padded samples.
    """
    return config.stage == "sft" and bool(config.data.packing) and config.ulysses_sequence_parallel_size == 1


def autocast(precision: torch.dtype, device_name: str) -> Any:
    """The forward pass's autocast context; none in fp32."""
    return nullcontext() if precision == torch.float32 else torch.autocast(device_name, dtype=precision)


def peak_memory(device_name: str) -> dict[str, float]:
    """Largest memory of this rank so far, as a metric: allocated on the GPU, resident on a CPU."""
    if device_name == "cuda":
        return {"system/peak_memory_gib": torch.cuda.max_memory_allocated() / GIB}
    return {"system/peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
