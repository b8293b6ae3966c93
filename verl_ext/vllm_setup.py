"""The one place that sets up vLLM, for rollouts and evaluation. Importing it does not import vLLM."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from verl_ext.errors import UserError
from verl_ext.files import GIB
from verl_ext.hardware import gpu_has_bf16, has_bf16_units
from verl_ext.model_files import config_entries, config_of, require_no_remote_code_in

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

AUTO_MAP = "auto_map"
"""Key of a model configuration that names custom classes and their files."""
_EVERYWHERE = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # one process: no engine process outlives it, and vLLM's scheduling is reproducible
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"
_ON_CPU = {
    _CPU_CACHE: "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # `enforce_eager` still compiles the sampler, which takes 14 to 28 s; this does not
    "TORCHDYNAMO_DISABLE": "1",
}
SMALL_MODEL_PARAMETERS = 50_000_000
CACHE_BLOCK_TOKENS = 32
"""At least the tokens of a block of vLLM's cache; a sequence fills its last block in part."""
MIN_CACHE_BYTES, MAX_CACHE_BYTES = 1 << 28, 1 << 32
"""Limits of a small model's cache; if it needs more, vLLM chooses the size, which must fit into the GPU."""


def prepare_vllm_environment() -> str:
    """Set the environment variables that vLLM reads at import, and return the GPU's name, or `cpu`.

    Values that the user has set are kept.
    """
    import torch

    # silence the warning about a missing CUDA toolkit, which a machine without GPUs does not need
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    on_gpu = torch.cuda.device_count() > 0
    for name, value in (_EVERYWHERE if on_gpu else {**_EVERYWHERE, **_ON_CPU}).items():
        os.environ.setdefault(name, value)
    return torch.cuda.get_device_name(0) if on_gpu else "cpu"


def cpu_cache_bytes() -> float:
    """Bytes of vLLM's cache of keys and values on a CPU.

    Raises:
        UserError: the environment variable is not an integer, which vLLM cannot read.
    """
    text = os.environ.get(_CPU_CACHE, _ON_CPU[_CPU_CACHE])
    try:
        return float(int(text) * GIB)
    except ValueError:
        raise UserError(f"{_CPU_CACHE} is '{text}'; set it to a whole number of GiB, such as 1, or unset it") from None


def small_model_arguments(config: Mapping[str, Any], max_model_len: int, max_num_seqs: int) -> dict[str, Any]:
    """Return arguments of vllm.LLM that spare a small model the set-up of a large one on a GPU.

    By default, vLLM fills its share of the memory with cache blocks, which are millions for a model of a few layers,
    and captures CUDA graphs.

    Args:
        config: the model's `config.json`; without the sizes of a plain transformer, nothing changes.
        max_model_len: maximum length of prompt and completion together, in tokens.
        max_num_seqs: maximum number of sequences in a batch.
    """
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    sizes = [size for name in names if isinstance(size := config.get(name), int)]
    is_plain = set(config.get("layer_types") or ()) <= {"full_attention"}
    if not is_plain or len(sizes) < len(names):
        return {}
    layers, width, inner, heads, vocabulary = sizes
    experts = config.get("num_experts") or config.get("num_local_experts") or 1
    parameters = layers * (4 * width**2 + 3 * experts * width * inner) + 2 * vocabulary * width
    if parameters > SMALL_MODEL_PARAMETERS:
        return {}
    head_size = config.get("head_dim") or width // heads
    bytes_per_token = 2 * layers * (config.get("num_key_value_heads") or heads) * head_size * 4
    length = min(max_model_len, config.get("max_position_embeddings") or max_model_len)
    needed = bytes_per_token * (length + CACHE_BLOCK_TOKENS) * max_num_seqs
    cache = {"kv_cache_memory_bytes": max(needed, MIN_CACHE_BYTES)} if needed <= MAX_CACHE_BYTES else {}
    return {"enforce_eager": True, **cache}


def require_vllm_arguments(names: Iterable[str], section: str) -> None:
    """Refuse names that are not arguments of vLLM's `EngineArgs`.

    Args:
        section: the key of which they are keys.

    Raises:
        UserError: with a similar argument, if there is one.
    """
    from vllm.engine.arg_utils import EngineArgs

    known = [field.name for field in fields(EngineArgs)]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            fix = f"did you mean {section}.{near[0]}?" if near else "remove it"
            raise UserError(f"vLLM has no argument {name} ({section}.{name}); {fix}")


def pick_vllm_dtype(wanted: str, on_gpu: bool, stored: torch.dtype | None) -> str:
    """Choose the dtype of vLLM's weights.

    Args:
        wanted: a dtype, or `auto` for bfloat16 if the machine supports it in hardware; otherwise float32 on a CPU, and
            vLLM's choice on a GPU.
        on_gpu: whether vLLM will run on a GPU.
        stored: the dtype in the model's files. On a CPU, `auto` keeps float32, so that a model trained in float32 is
            evaluated in float32: after GRPO, bfloat16 changed 8 of the first 16 greedy answers of a model.
    """
    if wanted != "auto":
        return wanted
    import torch

    if on_gpu:
        return auto_dtype_on_gpu()
    # a CPU without bfloat16 units takes 2.4 times as long in bfloat16 (a batch of 16, 100M parameters)
    return "bfloat16" if stored != torch.float32 and has_bf16_units() else "float32"


def auto_dtype_on_gpu() -> str:
    """bfloat16 if the GPU supports it; `auto` lets vLLM choose float16 or, for models such as Gemma 3, float32."""
    return "bfloat16" if gpu_has_bf16() else "auto"


def is_memory_error(error: Exception) -> bool:
    """Whether vLLM failed because memory is short, so that other processes or settings may be the cause."""
    import torch

    is_memory = re.search("memory|KV cache", str(error), re.IGNORECASE)
    return isinstance(error, torch.OutOfMemoryError) or is_memory is not None


def safe_vllm_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Change arguments of vllm.LLM so that it runs no custom code of a model unless `trust_remote_code` is set.

    vLLM before 0.14 imports the classes in `auto_map` regardless of `trust_remote_code` (CVE-2026-22807,
    CVE-2026-4944), so it gets a configuration without that key.

    Raises:
        UserError: the model requests code in another way, or has an `auto_map` while the user sets `hf_overrides`.
    """
    if arguments.get("trust_remote_code"):
        return arguments
    name = arguments["model"]
    config = config_of(name)
    require_no_remote_code_in(name, config)
    if not any(key == AUTO_MAP and value for key, value in config_entries(config)):
        return arguments
    if arguments.get("hf_overrides"):
        raise UserError(
            f"{name} has custom code (auto_map in its config.json), which vLLM would run without permission if "
            "hf_overrides is set; remove hf_overrides, or set trust_remote_code=true if you trust its author"
        )
    return {**arguments, "hf_overrides": drop_auto_map}


def drop_auto_map(config: PretrainedConfig) -> PretrainedConfig:
    """Remove `auto_map` from a configuration and its parts, in place."""
    from transformers import PretrainedConfig

    vars(config).pop(AUTO_MAP, None)
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            drop_auto_map(part)
        elif isinstance(part, dict):
            part.pop(AUTO_MAP, None)
    return config
