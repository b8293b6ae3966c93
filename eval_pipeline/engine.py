"""Greedy answers from vLLM. Runs in a process of its own (see `generation.py`); importing it imports no vLLM."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.errors import UserError
from verl_ext.native_output import quiet_native_stdout

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

MAX_MODEL_LEN = 6144
SEED = 0

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


@dataclass(frozen=True)
class Answer:
    """What the model said to one prompt."""

    text: str
    num_tokens: int
    truncated: bool
    """Cut off at the token limit or at the model's length."""
    error: str | None = None
    """Why there is no answer; None when there is one."""


@dataclass(frozen=True)
class Generation:
    """The answers in the prompts' order, and how they came about."""

    answers: list[Answer]
    seconds: dict[str, float]
    """Wall-clock seconds of `import_s`, `engine_s` and `generate_s`."""
    protocol: dict[str, Any]
    """Sampling and engine settings, as they end up in `metrics.json`."""


def generate_greedily(export: Path, prompts: Sequence[str], max_tokens: int) -> Generation:
    """Answer every prompt once, at temperature 0, through the model's chat template.

    Args:
        export: Hugging Face model directory with a chat template.
        prompts: user instructions.
        max_tokens: most new tokens of an answer.

    Returns:
        One answer for each prompt. A prompt too long for the model has an `error` in place of text.

    Raises:
        UserError: the model's configuration cannot be read or names an architecture that transformers does not know.
    """
    started = time.monotonic()
    on_gpu = _prepare_environment()
    max_model_len = _max_model_len(export)
    import vllm

    imported = time.monotonic()
    # float32 on a CPU: without bf16 units, bfloat16 took 2.4 times as long for a batch of 16 (100M parameters)
    dtype = "bfloat16" if on_gpu else "float32"
    with quiet_native_stdout():
        llm = vllm.LLM(str(export), dtype=dtype, max_model_len=max_model_len, enforce_eager=not on_gpu, seed=SEED)
    ready = time.monotonic()
    answers = _answer(llm, [_tokenize(llm, prompt) for prompt in prompts], max_tokens, max_model_len)
    ended = time.monotonic()
    return Generation(
        answers,
        seconds={"import_s": imported - started, "engine_s": ready - imported, "generate_s": ended - ready},
        protocol=_protocol(max_tokens, max_model_len, dtype, vllm.__version__),
    )


def _prepare_environment() -> bool:
    """Settings that vLLM reads when it is imported; what the user has set stays. Returns whether there is a GPU."""
    import torch

    on_gpu = torch.cuda.device_count() > 0
    for name, value in (_EVERYWHERE if on_gpu else {**_EVERYWHERE, **_ON_CPU}).items():
        os.environ.setdefault(name, value)
    return on_gpu


def _max_model_len(export: Path) -> int:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(export).get_text_config().to_dict()
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"Cannot read {export}/config.json, mend or export it again: {reason}") from error
    # a model without positions of its own states no limit
    return min(config.get("max_position_embeddings") or MAX_MODEL_LEN, MAX_MODEL_LEN)


def _tokenize(llm: LLM, prompt: str) -> list[int]:
    chat = [{"role": "user", "content": prompt}]
    return list(llm.get_tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


def _answer(llm: LLM, prompts: list[list[int]], max_tokens: int, max_model_len: int) -> list[Answer]:
    from vllm import SamplingParams

    fitting = [{"prompt_token_ids": tokens} for tokens in prompts if len(tokens) < max_model_len]
    greedy = SamplingParams(temperature=0.0, top_p=1.0, max_tokens=max_tokens)
    # one call for all: vLLM batches them itself, and one prompt too long would fail the whole batch
    outputs = iter(llm.generate(fitting, greedy) if fitting else [])
    return [
        _read_output(next(outputs)) if len(tokens) < max_model_len else _too_long(len(tokens), max_model_len)
        for tokens in prompts
    ]


def _read_output(output: RequestOutput) -> Answer:
    completion = output.outputs[0]
    return Answer(completion.text, len(completion.token_ids), truncated=completion.finish_reason == "length")


def _too_long(num_tokens: int, max_model_len: int) -> Answer:
    return Answer("", 0, False, f"The prompt has {num_tokens} tokens and the model takes {max_model_len}.")


def _protocol(max_tokens: int, max_model_len: int, dtype: str, version: str) -> dict[str, Any]:
    return {
        "temperature": 0.0,
        "top_p": 1.0,
        "answers_per_problem": 1,
        "max_tokens": max_tokens,
        "max_model_len": max_model_len,
        "dtype": dtype,
        "seed": SEED,
        "engine": f"vllm {version}",
    }
