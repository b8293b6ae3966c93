"""Refuses model code that the user did not enable, even where a library would run it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_ext.errors import UserError

_ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_FIX = "remove that key from it, or set trust_remote_code=true if you trust its author"


def require_no_remote_code(name: str, trusted: bool, local_files_only: bool = False) -> None:
    """Refuse a model whose `config.json` would make transformers run code that the user did not enable.

    With `trust_remote_code=False`, transformers 4.57 ignored the model's own classes but not what these keys name:
    `trust_remote_code` in a configuration (CVE-2026-5241), and an attention function on the hub (CVE-2026-4372).
    transformers 5 no longer follows the first, and accepts the second from verified organizations only. The check holds
    whatever a release does.

    Args:
        name: a directory, or a name on the hub.
        trusted: `trust_remote_code`.
        local_files_only: whether to stay off the hub.

    Raises:
        UserError: it would.
    """
    if not trusted:
        require_no_remote_code_in(name, config_of(name, local_files_only))


def require_no_remote_code_in(name: str, content: Mapping[str, Any]) -> None:
    """Like `require_no_remote_code`, for a configuration that was read already.

    Raises:
        UserError: it would make transformers run code.
    """
    for key, value in config_entries(content):
        if key == "trust_remote_code" and value:
            raise UserError(f"{name} asks by itself for code to be run (trust_remote_code in its config.json); {_FIX}")
        if key in _ATTENTION and "/" in str(value):
            raise UserError(f"{name} asks for attention code from the hub ({key} in its config.json); {_FIX}")


def config_of(name: str, local_files_only: bool = False) -> dict[str, Any]:
    """What transformers reads as the model's configuration; empty if there is none, which the loader reports."""
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(name, local_files_only=local_files_only)[0]
    except (OSError, ValueError):
        return {}


def config_entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key, item
            yield from config_entries(item)
    elif isinstance(value, list):
        for item in value:
            yield from config_entries(item)
