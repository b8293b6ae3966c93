"""How vLLM is set up by what it reads from the environment. Importing this imports no vLLM."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_EVERYWHERE = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # one process: nothing of the engine is left when it goes, and vLLM's scheduling is the same each time
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # `enforce_eager` still compiles the sampler, which takes 14 to 28 s; this does not
    "TORCHDYNAMO_DISABLE": "1",
}
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""What Linux calls bfloat16 units on x86 and on Arm."""


def prepare_environment() -> str:
    """Set what vLLM reads when it is imported; what the user has set stays.

    Returns:
        The GPU's name, or `cpu`.
    """
    import torch

    # it misses a CUDA toolkit, which a machine without GPUs need not have
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    on_gpu = torch.cuda.device_count() > 0
    for name, value in (_EVERYWHERE if on_gpu else {**_EVERYWHERE, **_ON_CPU}).items():
        os.environ.setdefault(name, value)
    return torch.cuda.get_device_name(0) if on_gpu else "cpu"


def pick_dtype(wanted: str, on_gpu: bool, stored: torch.dtype | None) -> str:
    """The number type of vLLM's weights.

    Args:
        wanted: a type; or `auto`, which is bfloat16 where that is quick, and else float32.
        on_gpu: whether vLLM will run on a GPU.
        stored: the model's own. On a CPU `auto` keeps float32, so that an export of what was trained in it is evaluated
            as it was trained; of one run by GRPO bfloat16 ended 8 of the first 16 greedy answers, float32 all.
    """
    if wanted != "auto":
        return wanted
    import torch

    if stored == torch.float32 and not on_gpu:
        return "float32"
    # a CPU without units for it takes 2.4 times as long in bfloat16 (a batch of 16, 100M parameters)
    return "bfloat16" if on_gpu or _BF16_FLAGS & set(Path("/proc/cpuinfo").read_text().split()) else "float32"
