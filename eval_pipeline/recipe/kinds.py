"""What kind of value each key of a recipe takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_ext.errors import UserError

KINDS = {
    "datasets": "a mapping of names",
    "tiers.tier1": "a list of text",
    "tiers.tier2": "a list of text",
    "tiers.tier3": "a list of text",
    "tier2_every": "a whole number",
    "sampling.temperature": "a number",
    "sampling.top_p": "a number",
    "sampling.max_tokens": "a whole number",
    "sampling.num_samples": "a whole number",
    "sampling.seed": "a whole number",
    "batch_size": "a whole number",
    "engine.kind": "text",
    "engine.max_model_len": "a whole number",
    "engine.dtype": "text",
    "engine.gpu_memory_utilization": "a number",
    "engine.tensor_parallel_size": "a whole number",
    "engine.vllm": "a mapping of names",
    "engine.base_url": "text or null",
    "engine.model": "text or null",
    "engine.api_key_env": "text",
    "engine.concurrency": "a whole number",
    "engine.timeout_s": "a number",
    "judge.isolation": "text",
    "judge.num_workers": "a whole number or null",
    "judge.packages": "a list of text",
    "judge.limits.cpu_s": "a number",
    "judge.limits.wall_s": "a number",
    "judge.limits.memory_mb": "a whole number",
    "judge.limits.num_processes": "a whole number",
    "judge.limits.file_mb": "a whole number",
    "judge.limits.output_mb": "a number",
    "selection.metric": "text",
    "selection.mode": "text",
    "selection.dataset": "text or null",
    "executor.kind": "text",
    "executor.num_workers": "a whole number or null",
    "executor.address": "text or null",
    "max_attempts": "a whole number",
    "backoff_s": "a number",
    "poll_s": "a number",
    "qa_per_error_type": "a whole number",
    "wandb": "true or false",
}
NULLABLE = tuple(key for key, kind in KINDS.items() if kind.endswith(" or null"))

_TYPES = {"text": str, "a whole number": int, "a number": int | float, "true or false": bool}
_MAY_BE_A_KEY = ("engine.api_key_env", "engine.base_url")


def require_kinds(config: Mapping[str, Any]) -> None:
    """Refuse a value of another kind than its key takes.

    Args:
        config: the resolved recipe, as plain mappings.

    Raises:
        UserError: the key, its value unless that may be a secret, and what it must be.
    """
    for key, kind in KINDS.items():
        value = _value_of(config, key)
        if not _is_of(value, kind):
            shown = "has an invalid value" if key in _MAY_BE_A_KEY else f"is {value!r}"
            quotes = ", in quotes if it looks like a number" if kind.startswith("text") else ""
            raise UserError(f"{key} {shown}; it must be {kind}{quotes}")


def _value_of(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value[name]
    return value


def _is_of(value: Any, kind: str) -> bool:
    if value is None:
        return kind.endswith(" or null")
    wanted = kind.removesuffix(" or null")
    if isinstance(value, bool) and wanted != "true or false":
        return False  # to Python it is a whole number
    if wanted == "a list of text":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if wanted == "a mapping of names":
        return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    return isinstance(value, _TYPES[wanted])
