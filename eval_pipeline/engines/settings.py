"""Which engine answers, and how it is set up."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from verl_ext.errors import UserError

OWN_VLLM_ARGUMENTS = ("model", "max_model_len", "dtype", "gpu_memory_utilization", "tensor_parallel_size", "hf_token")
"""Arguments of vllm.LLM that come from elsewhere."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine; `recipe/defaults.yaml` shows them as a user writes them.

    Raises:
        UserError: settings that contradict each other, or that would put a key into a file.
    """

    kind: str = "vllm"
    """vllm: in a process of its own; openai: a running server."""
    max_model_len: int = 6144
    """vllm: tokens of prompt and answer together, bounded by the model's own length."""
    dtype: str = "auto"
    """vllm: auto takes bfloat16 on a GPU, on a CPU with units for it unless the weights are float32, else float32."""
    gpu_memory_utilization: float = 0.9
    """vllm: share of the GPU's memory."""
    tensor_parallel_size: int = 1
    """vllm: GPUs that share one model."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """vllm: further arguments of vllm.LLM."""
    base_url: str | None = None
    """openai: such as http://localhost:8000/v1."""
    model: str | None = None
    """openai: name of the model; None takes the only one that the server has."""
    api_key_env: str = "OPENAI_API_KEY"
    """openai: name of the environment variable that holds the key."""
    concurrency: int = 32
    """openai: requests under way at a time."""
    timeout_s: float = 600
    """openai: seconds for one answer, retries included; vllm: seconds without a step after which it counts as hung."""

    def __post_init__(self) -> None:
        for name in self.vllm:
            if name in OWN_VLLM_ARGUMENTS:
                raise UserError(f"engine.vllm.{name} is set elsewhere; {_place_of(name)}")
        # the value is not shown, for it may be a key
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.api_key_env):
            raise UserError(
                "engine.api_key_env is not a variable name; store the key in an environment variable and give its name"
            )
        if self.kind == "openai":
            _require_url(self.base_url)

    def require_own_model(self, command: str) -> None:
        """Refuse a server for a command that evaluates models of its choice.

        Raises:
            UserError: the engine is a server.
        """
        if self.kind == "openai":
            raise UserError(
                f"`{command}` loads every model itself, but engine.kind=openai has one model only; remove it or use "
                "`run engine.kind=openai engine.base_url=...` to evaluate the server's model"
            )


def _place_of(name: str) -> str:
    if name == "model":
        return "the model is the evaluated checkpoint"
    # what stands in a recipe ends up in logs
    return "store the token in the environment variable HF_TOKEN" if name == "hf_token" else f"set engine.{name}"


def _require_url(url: str | None) -> None:
    try:
        parts = urlsplit(url or "")
    except ValueError as error:
        raise UserError(f"engine.base_url is not a URL ({error}); give one such as http://localhost:8000/v1") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError("engine.kind=openai needs the server's URL; set engine.base_url=http://localhost:8000/v1")
    if parts.username or parts.password or parts.query:
        raise UserError(
            "engine.base_url must not hold credentials; store the key in the variable that engine.api_key_env names"
        )
