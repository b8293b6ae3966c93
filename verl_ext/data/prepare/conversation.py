"""One input row becomes one checked conversation: a `messages` list plus the row's other columns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from verl_ext.data.prepare.files import Row

MESSAGES_KEYS = ("messages", "conversation", "conversations")
PROMPT_KEYS = ("prompt", "instruction", "question", "query", "input")
RESPONSE_KEYS = ("response", "completion", "answer", "output")
ROLES = ("system", "user", "assistant", "tool")


class BadRow(Exception):
    """A row that is no conversation; the message says why and the reader of the file adds where."""


@dataclass(frozen=True)
class ColumnKeys:
    """Names of the columns to read; a name that is None is found among the usual ones, row by row."""

    messages: str | None = None
    prompt: str | None = None
    response: str | None = None


def to_conversation(value: Any, keys: ColumnKeys) -> Row:
    """Check one row and bring it to the `messages` format.

    Args:
        value: the decoded row; anything but an object is refused.
        keys: the columns that hold the conversation.

    Returns:
        The row with `messages` in place of the columns that held the conversation.

    Raises:
        BadRow: the row has no conversation, a turn is malformed, or no assistant turn is there to learn from.
    """
    if isinstance(value, json.JSONDecodeError):
        raise BadRow(f"it is not JSON ({value})")
    if not isinstance(value, dict):
        raise BadRow(f"it is a {type(value).__name__}, not an object")
    messages, used = _extract(value, keys)
    _check(messages)
    return {"messages": messages, **{name: item for name, item in value.items() if name not in (*used, "messages")}}


def _extract(row: Row, keys: ColumnKeys) -> tuple[list[Any], tuple[str, ...]]:
    named_pair = keys.prompt is not None or keys.response is not None
    messages_key = None if named_pair else _find(row, keys.messages, MESSAGES_KEYS)
    if messages_key is not None:
        if not isinstance(row[messages_key], list):
            raise BadRow(f"column {messages_key!r} is not a list of turns")
        return row[messages_key], (messages_key,)
    prompt = _find(row, keys.prompt, PROMPT_KEYS)
    response = _find(row, keys.response, RESPONSE_KEYS)
    if prompt is None or response is None:
        raise BadRow(
            f"its columns {sorted(row)} hold no conversation that is found by itself (name them by --messages-key, "
            "or by --prompt-key and --response-key)"
        )
    return _turns(row[prompt], "user") + _turns(row[response], "assistant"), (prompt, response)


def _find(row: Row, named: str | None, usual: tuple[str, ...]) -> str | None:
    if named is None:
        return next((key for key in usual if row.get(key) is not None), None)
    if row.get(named) is None:
        raise BadRow(f"column {named!r} is missing or null")
    return named


def _turns(value: Any, role: str) -> list[Any]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _check(messages: list[Any]) -> None:
    for position, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise BadRow(f"turn {position} is not an object with role and content")
        if message.get("role") not in ROLES:
            raise BadRow(f"turn {position} has the role {message.get('role')!r}, not one of {', '.join(ROLES)}")
        _check_content(message, position)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("it has no assistant turn")


def _check_content(message: Row, position: int) -> None:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return
    if not isinstance(content, str):
        raise BadRow(f"turn {position} has content of type {type(content).__name__}, not text")
    if message["role"] == "assistant" and not content.strip() and not message.get("tool_calls"):
        raise BadRow(f"turn {position} is an empty assistant turn")
