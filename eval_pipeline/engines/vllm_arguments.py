"""The arguments of vllm.LLM. Importing this imports no vLLM."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from eval_pipeline.config import EngineConfig
from verl_ext.errors import UserError, first_line_of
from verl_ext.vllm_setup import pick_vllm_dtype, safe_vllm_arguments


def arguments_for(settings: EngineConfig, model: str, on_gpu: bool) -> dict[str, Any]:
    """Arguments of vllm.LLM.

    Args:
        settings: of the engine.
        model: Hugging Face model directory.
        on_gpu: whether vLLM will run on a GPU.

    Raises:
        UserError: an argument that vLLM does not have, a number type that it does not have for the model, or a model
            that asks for code to be run.
    """
    from vllm import EngineArgs

    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in settings.vllm:
        if name not in known:
            raise UserError(f"engine.vllm.{name} is not an argument of vllm.LLM; {_advice(name, known)}")
    wanted = {
        "enforce_eager": not on_gpu,
        "seed": 0,
        "use_tqdm_on_load": False,
        # vLLM 0.12 rewinds a request's random numbers after part of its prompt, which a CPU's generator cannot do
        "enable_chunked_prefill": None if on_gpu else False,
        **settings.vllm,
        "model": model,
        "dtype": settings.dtype,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "tensor_parallel_size": settings.tensor_parallel_size,
    }
    arguments = safe_vllm_arguments(wanted)
    # vLLM's own reading of the configuration, which knows every way to write down a length, scaled positions included
    config = EngineArgs(**arguments).create_model_config()
    dtype = pick_vllm_dtype(settings.dtype, on_gpu, config.hf_text_config.dtype)
    if not on_gpu and "linear_attention" in (getattr(config.hf_text_config, "layer_types", None) or ()):
        if settings.dtype not in ("auto", "bfloat16"):
            raise UserError(
                f"vLLM computes linear attention, which {model} has, in bfloat16 alone on a CPU; set engine.dtype=auto"
            )
        dtype = "bfloat16"
        arguments = {"enable_prefix_caching": False, **arguments}  # of states it needs chunked prefill
    return {**arguments, "dtype": dtype, "max_model_len": min(config.max_model_len, settings.max_model_len)}


def _advice(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else "see the fields of vllm.EngineArgs"


def reason_of(error: Exception) -> str:
    """What vLLM complains about, in one line."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return first_line_of(error)
    first = error.errors()[0]
    complaint = first["msg"].splitlines()[0].removeprefix("Value error, ")
    return f"{complaint} ({'.'.join(map(str, first['loc'])) or error.title})"
