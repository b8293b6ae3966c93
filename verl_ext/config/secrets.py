"""Keeps keys and passwords out of configurations, messages, and the environments of processes that need none."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from verl_ext.errors import UserError

HIDDEN = "***"
_OF_VARIABLES = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
# not every `token` and `key`, because most settings with these words count tokens or name columns
_OF_SETTINGS = re.compile(
    r"(^|[._])((api|access|private|secret)_?key|secret|password|passwd|credentials?|(api|access|auth|hf)_?token)$"
    r"|(^|\.)token$",
    re.IGNORECASE,
)
_PASSWORD = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]+(?=@)")
_SHORTEST = 12
"""Minimum length of a variable's value to search for: a shorter value may be an ordinary word."""


def require_no_secrets(settings: Mapping[str, Any]) -> None:
    """Refuse a configuration that holds a key or a password; the message does not repeat the secret.

    Args:
        settings: values by dotted key; values may be nested.

    Raises:
        UserError: a setting holds a secret; the message names the setting and where the secret belongs.
    """
    for key, value in leaves(settings):
        if not isinstance(value, str):
            continue
        if _OF_SETTINGS.search(key) and value:
            why = "seems to hold a secret, judging by its name"
        elif _PASSWORD.search(value):
            why = "holds an address with a password"
        elif name := next((name for name, secret in _secrets() if secret in value), None):
            why = f"holds the value of the variable {name}"
        else:
            continue
        raise UserError(
            f"{key} {why}, but configurations are written to files and logs; remove it and put the secret into an "
            "environment variable: WANDB_API_KEY, HF_TOKEN, HTTPS_PROXY, or the one that engine.api_key_env names"
        )


def masked(text: str) -> str:
    """Mask the secrets in a text, such as a user's `key=value`, before it is shown."""
    key, equals, _ = text.partition("=")
    if equals and _OF_SETTINGS.search(key):
        return f"{key}={HIDDEN}"
    for _, secret in _secrets():
        text = text.replace(secret, HIDDEN)
    return _PASSWORD.sub(HIDDEN, text)


def without_secrets(environment: Mapping[str, str], keep: Collection[str] = ()) -> dict[str, str]:
    """Remove variables that hold keys, judging by their names, or addresses with a password from an environment.

    Args:
        keep: names of variables to keep in any case.
    """
    return {
        name: value
        for name, value in environment.items()
        if name in keep or not (_OF_VARIABLES.search(name) or _PASSWORD.search(value))
    }


def _secrets() -> list[tuple[str, str]]:
    return [
        (name, value) for name, value in os.environ.items() if _OF_VARIABLES.search(name) and len(value) >= _SHORTEST
    ]


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """All values at any depth of mappings and lists, each with its dotted key."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item, key)
    else:
        yield key, value
