"""How vLLM is set up: environment variables and the arguments of vllm.LLM. Importing this imports no vLLM."""

from __future__ import annotations

import dataclasses
import difflib
import os
from pathlib import Path
from typing import Any

from eval_pipeline.engines.settings import EngineSettings
from verl_ext.errors import UserError, first_line_of

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

    on_gpu = torch.cuda.device_count() > 0
    for name, value in (_EVERYWHERE if on_gpu else {**_EVERYWHERE, **_ON_CPU}).items():
        os.environ.setdefault(name, value)
    return torch.cuda.get_device_name(0) if on_gpu else "cpu"


def arguments_for(settings: EngineSettings, model: str, on_gpu: bool) -> dict[str, Any]:
    """Arguments of vllm.LLM.

    Args:
        settings: of the engine.
        model: Hugging Face model directory.
        on_gpu: whether vLLM will run on a GPU.

    Raises:
        UserError: an argument that vLLM does not have.
    """
    from vllm import EngineArgs

    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in settings.vllm:
        if name not in known:
            raise UserError(f"engine.vllm.{name} is no argument of vllm.LLM; {_advice(name, known)}")
    arguments = {
        "enforce_eager": not on_gpu,
        "seed": 0,
        "use_tqdm_on_load": False,
        # vLLM 0.12 rewinds a request's random numbers after part of its prompt, which a CPU's generator cannot do
        "enable_chunked_prefill": None if on_gpu else False,
        **settings.vllm,
        "model": model,
        "dtype": _dtype(settings.dtype, on_gpu),
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "tensor_parallel_size": settings.tensor_parallel_size,
    }
    # vLLM's own reading of the configuration, which knows every way to write down a length, scaled positions included
    longest = EngineArgs(**arguments).create_model_config().max_model_len
    return {**arguments, "max_model_len": min(longest, settings.max_model_len)}


def _advice(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}" if near else "see the fields of vllm.EngineArgs"


def _dtype(wanted: str, on_gpu: bool) -> str:
    if wanted != "auto":
        return wanted
    # a CPU without units for it takes 2.4 times as long in bfloat16 (a batch of 16, 100M parameters)
    return "bfloat16" if on_gpu or _BF16_FLAGS & set(Path("/proc/cpuinfo").read_text().split()) else "float32"


def reason_of(error: Exception) -> str:
    """What vLLM complains about, in one line."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return first_line_of(error)
    first = error.errors()[0]
    complaint = first["msg"].splitlines()[0].removeprefix("Value error, ")
    return f"{complaint} ({'.'.join(map(str, first['loc'])) or error.title})"
