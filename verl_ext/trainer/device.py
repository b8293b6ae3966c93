"""Resolves "auto" on this machine: the device, the attention function, and the dtype of the forward pass."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from contextlib import nullcontext
from typing import Any, Literal, cast

import torch
from transformers.utils import is_flash_attn_2_available

from verl_ext.console import print_line
from verl_ext.distributed import gather_results, on_rank_zero
from verl_ext.errors import UserError
from verl_ext.files import GIB
from verl_ext.hardware import cpu_name, disable_cudnn_attention, has_bf16_units, pick_precision
from verl_ext.metrics.run_record import RunRecord
from verl_ext.trainer.config import Device
from verl_ext.trainer.stages import RunConfig, SFTConfig
from verl_ext.verl_api import PrecisionType, get_device_name

VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The environment variable that hides accelerators, by device."""
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # from <malloc.h>
TOP_PAD_BYTES = 64 << 20
LARGEST_INT = 2**31 - 1


def device_names(device: str) -> list[str]:
    """Return the name of each CUDA GPU that this process sees; otherwise, the name of the CPU."""
    if device == "cuda":
        return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return [cpu_name() or device]


def resolve_device(config: RunConfig) -> str:
    """Set `trainer.device=auto` to the accelerator of this machine, or to cpu, and return it.

    Raises:
        UserError: the configured accelerator is not available on this machine.
    """
    available = get_device_name()
    wanted = config.trainer.device
    if wanted not in ("auto", "cpu", available):
        raise UserError(f"trainer.device is {wanted}, but this machine has {available}; set trainer.device=auto")
    if wanted == "cpu" and available != "cpu":
        raise UserError(
            f"trainer.device=cpu is not supported on a machine with {'NPUs' if available == 'npu' else 'GPUs'}; to "
            f"train on the CPU, hide them with {VISIBLE_DEVICES[available]}=''"
        )
    device = cast("Device", available)
    config.trainer.device = device
    return device


def pick_attention(setting: str, device_name: str, precision: torch.dtype) -> str:
    """Resolve `model.attn_implementation`: auto is flash-attention where it can run, else sdpa.

    Args:
        precision: dtype of the forward pass; flash-attention does not support fp32.
    """
    can_flash = device_name == "cuda" and precision != torch.float32 and is_flash_attn_2_available()
    if setting == "auto":
        return "flash_attention_2" if can_flash else "sdpa"
    if setting == "flash_attention_2" and not can_flash:
        raise UserError(
            "model.attn_implementation=flash_attention_2 needs a GPU, the flash-attn package and bf16; "
            "install it and set model.mixed_precision=bf16, or set it to auto"
        )
    return setting


def resolve_precision(config: RunConfig, device_name: str) -> torch.dtype:
    """Resolve `model.mixed_precision`; collective.

    On CPUs, auto is fp32, except in the stage sft, where it is bf16 if the processor of every rank has bf16 units
    (without them, autocast doubles the step time), and a resumed run keeps the choice of its first start.
    """
    setting = config.model.mixed_precision
    if setting != "auto" or config.stage != "sft" or device_name != "cpu":
        return pick_precision(setting, device_name)
    has_units = all(gather_results(has_bf16_units))
    precision = on_rank_zero(lambda: auto_precision_on_cpus(config, has_units))
    if precision == "bf16" and not has_units:
        message = (
            "This run has used bf16 since its first start; this CPU has no native bf16 support, so steps are slower."
        )
        on_rank_zero(lambda: print_line(message, sys.stderr))
    return PrecisionType.to_dtype(precision)


def auto_precision_on_cpus(config: RunConfig, has_units: bool) -> Literal["bf16", "fp32"]:
    """Return what auto means on CPUs, see `resolve_precision`; `has_units`: whether they have bf16 units."""
    if config.stage != "sft":
        return "fp32"
    recorded: Literal["bf16", "fp32"] | None = RunRecord(config.trainer.run_dir).read()["precision"]
    return recorded or ("bf16" if has_units else "fp32")


def autocast(precision: torch.dtype, device_name: str) -> Any:
    """Return the autocast context of a forward pass; it does nothing in fp32."""
    return nullcontext() if precision == torch.float32 else torch.autocast(device_name, dtype=precision)


def prepare_device(config: RunConfig) -> str:
    """Resolve `trainer.device` (cuda, npu or cpu), and set process-wide options before the first kernel runs.

    Raises:
        UserError: see `resolve_device`.
    """
    device_name = resolve_device(config)
    if device_name == "cpu":
        keep_freed_memory()
    if device_name == "cuda":
        disable_cudnn_attention()
    if isinstance(config, SFTConfig) and config.trainer.deterministic:
        use_deterministic_kernels()
    return device_name


def keep_freed_memory() -> None:
    """Make glibc's malloc reuse freed memory instead of returning it to the kernel.

    By default, malloc maps each block above 32 MiB separately, and the kernel zeroes all of its pages, in every
    micro-batch for every activation of that size. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, LARGEST_INT)
        mallopt(M_TOP_PAD, TOP_PAD_BYTES)


def use_deterministic_kernels() -> None:
    """Make torch, cuBLAS and flash-attention bitwise deterministic; operations that cannot be raise an error.

    cuBLAS and flash-attention read these environment variables at their first use.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    torch.use_deterministic_algorithms(True)


def peak_memory(device_name: str) -> dict[str, float]:
    """Peak memory of this rank in GiB, as a metric: allocated on a GPU, resident on a CPU."""
    if device_name == "cuda":
        return {"system/peak_memory_gib": torch.cuda.max_memory_allocated() / GIB}
    return {"system/peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
