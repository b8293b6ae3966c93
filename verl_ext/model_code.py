"""Code that a model's directory brings along: run on request alone, also where a library would run it unasked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from verl_ext.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

AUTO_MAP = "auto_map"
"""Names classes of the model's own, each with the file that it is in."""
_ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")


def require_no_code(name: str, trusted: bool, local_files_only: bool = False) -> None:
    """Refuse a model whose `config.json` would have transformers run code that nobody asked for.

    With `trust_remote_code=False` transformers 4.57 left classes of the model's own alone, but not what these keys
    name: `trust_remote_code` in a configuration (CVE-2026-5241), and an attention function on the hub (CVE-2026-4372).
    transformers 5 no longer follows the first, and takes the second from verified organizations alone; the check holds
    whatever a release does.

    Args:
        name: a directory, or a name on the hub.
        trusted: whether the user asked for the model's code.
        local_files_only: whether the hub is not to be asked.

    Raises:
        UserError: it would.
    """
    if not trusted:
        require_no_code_in(name, _content(name, local_files_only))


def require_no_code_in(name: str, content: Mapping[str, Any]) -> None:
    """The same of what was read already.

    Args:
        name: of the model, for the message.
        content: of its `config.json`.

    Raises:
        UserError: it would have code run.
    """
    for key, value in _entries(content):
        if key == "trust_remote_code" and value:
            raise UserError(f"{name} asks by itself for code to be run (trust_remote_code in its config.json); {_MEND}")
        if key in _ATTENTION and "/" in str(value):
            raise UserError(f"{name} asks for attention code from the hub ({key} in its config.json); {_MEND}")


_MEND = "remove that key from it, or set trust_remote_code=true if you trust whoever made the model"


def vllm_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vllm.LLM with which it runs no code of the model's own unless `trust_remote_code` asks for it.

    vLLM below 0.14 imports what `auto_map` names whatever `trust_remote_code` says (CVE-2026-22807, CVE-2026-4944), so
    it gets a configuration without.

    Args:
        arguments: with `model`.

    Raises:
        UserError: the model asks for code in another way, or it has an `auto_map` beside `hf_overrides` of the user's.
    """
    if arguments.get("trust_remote_code"):
        return arguments
    name = arguments["model"]
    require_no_code(name, trusted=False)
    if not any(key == AUTO_MAP and value for key, value in _entries(_content(name))):
        return arguments
    if arguments.get("hf_overrides"):
        raise UserError(
            f"{name} brings code of its own (auto_map in its config.json), which vLLM runs unasked where hf_overrides "
            "is set; leave hf_overrides out, or set trust_remote_code=true if you trust whoever made the model"
        )
    return {**arguments, "hf_overrides": drop_auto_map}


def drop_auto_map(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration without names of code, those of its parts included; changed in place."""
    from transformers import PretrainedConfig

    vars(config).pop(AUTO_MAP, None)
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            drop_auto_map(part)
        elif isinstance(part, dict):
            part.pop(AUTO_MAP, None)
    return config


def _content(name: str, local_files_only: bool = False) -> dict[str, Any]:
    """What transformers reads as the model's configuration; empty where there is none, which the loader reports."""
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(name, local_files_only=local_files_only)[0]
    except (OSError, ValueError):
        return {}


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key, item
            yield from _entries(item)
    elif isinstance(value, list):
        for item in value:
            yield from _entries(item)
