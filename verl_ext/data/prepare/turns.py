"""The turns of a chat in OpenAI's or ShareGPT's form, checked and brought to `role` and `content` with plain text."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from verl_ext.data.prepare.files import Row

ROLES = ("system", "user", "assistant", "tool")
DEVELOPER = "developer"
CALL = "function_call"
SHAREGPT_ROLES = {
    **{role: role for role in (*ROLES, DEVELOPER, CALL)},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant"},
    **{"observation": "tool", "function_response": "tool"},
}
TURN_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "id", "index")
"""Keys of a turn. Others that are not null are refused: they hold text, or exclude the turn from training."""


class BadRow(Exception):
    """A row that cannot be used.

    Args:
        reason: what is wrong; the reader of the file adds where.
        fix: what to do; None where that is plain.
    """

    def __init__(self, reason: str, fix: str | None = None) -> None:
        super().__init__(reason)
        self.fix = fix


def to_turns(value: Any, notes: Counter[str]) -> list[Row]:
    """Check the turns of a chat.

    Args:
        value: a list of turns of either form, or JSON text of one.
        notes: counts the rows in which something was changed, by a description of it.

    Returns:
        The turns with `role` and `content`; content parts are joined, and arguments of tool calls are JSON text.

    Raises:
        BadRow: it is no such list, or text of it would be lost.
    """
    turns = from_json(value) if isinstance(value, str) else value
    if not isinstance(turns, list) or not turns:
        raise BadRow("it is not a list of turns, or is empty")
    checked = [_to_turn(turn, f"turn {position}", notes) for position, turn in enumerate(turns, start=1)]
    roles = {turn["role"] for turn in checked}
    if DEVELOPER in roles:
        if "system" in roles:
            raise BadRow("it has both system and developer turns", "merge them into one system turn")
        # Chat templates do not know the role: Qwen's omit such a turn, ChatML's show a role that the model never saw.
        notes["developer turns became system turns"] += 1
        checked = [{**turn, "role": "system"} if turn["role"] == DEVELOPER else turn for turn in checked]
    return checked


def is_sharegpt(turns: Any) -> bool:
    """Whether turns have ShareGPT's `from` and `value`."""
    first = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, dict) and {"from", "value"} <= first.keys()


def from_json(text: str) -> Any:
    """The value of JSON text, as CSV files hold lists; text that is none stays text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def text_of(content: Any, where: str) -> Any:
    """Content with text parts joined; what is neither text nor parts is returned as it is.

    Raises:
        BadRow: a part is no text, such as an image.
    """
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRow(f"{where} has a content part of type {kind!r}, and only text can be trained on")
    return "".join(part["text"] for part in content)


def _to_turn(turn: Any, where: str, notes: Counter[str]) -> Row:
    if not isinstance(turn, dict):
        raise BadRow(f"{where} is not an object with role and content")
    turn = {name: value for name, value in turn.items() if value is not None or name == "content"}
    if "from" in turn and "role" not in turn:
        turn = _from_sharegpt(turn, where)
    if turn.get("role") not in (*ROLES, DEVELOPER):
        raise BadRow(f"{where} has the role {turn.get('role')!r}, not one of {', '.join((*ROLES, DEVELOPER))}")
    if turn.get("weight") in (1, True):
        del turn["weight"]
    if "weight" in turn:
        raise BadRow(
            f"{where} has the weight {turn['weight']!r}, and training would ignore 'weight'",
            "drop the row, or end its chat before this turn",
        )
    unknown = [name for name in turn if name not in TURN_KEYS]
    if unknown:
        raise BadRow(f"{where} has the key {unknown[0]!r}, which training would ignore", "remove the key or the row")
    turn["content"] = text_of(turn.get("content"), where)
    if "tool_calls" in turn:
        turn["tool_calls"] = [_to_call(call, where) for call in _list(turn["tool_calls"])]
    _check_content(turn, where)
    return turn


def _check_content(turn: Row, where: str) -> None:
    content, has_calls = turn["content"], bool(turn.get("tool_calls"))
    if has_calls and turn["role"] != "assistant":
        raise BadRow(f"{where} has tool_calls but the role {turn['role']!r}, not assistant")
    if content is None and has_calls:
        return
    if not isinstance(content, str):
        fix = "put it in quotes" if isinstance(content, (int, float)) else None
        raise BadRow(f"{where} has content of type {type(content).__name__}, not text", fix)
    if turn["role"] == "assistant" and not content.strip() and not has_calls:
        raise BadRow(f"{where} is an empty assistant turn")


def _from_sharegpt(turn: Row, where: str) -> Row:
    role = SHAREGPT_ROLES.get(str(turn["from"]))
    if role is None:
        raise BadRow(f"{where} is from {turn['from']!r}, not one of {', '.join(SHAREGPT_ROLES)}")
    rest = {name: value for name, value in turn.items() if name not in ("from", "value", "content")}
    if turn.get("content") is not None:
        raise BadRow(f"{where} has both 'value' and 'content'", "remove one")
    value = turn.get("value")
    if role != CALL:
        return {**rest, "role": role, "content": value}
    calls = from_json(value) if isinstance(value, str) else value
    return {**rest, "role": "assistant", "content": "", "tool_calls": [calls] if isinstance(calls, dict) else calls}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _to_call(call: Any, where: str) -> Row:
    """A tool call with its arguments as JSON text: parquet would give all calls of a file the same arguments."""
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str):
        arguments = from_json(arguments) if arguments.strip() else {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise BadRow(f"{where} has a tool call that is not an object with name and arguments")
    named = {"id": call["id"]} if call.get("id") is not None else {}
    text = json.dumps(arguments, ensure_ascii=False)
    return {**named, "type": "function", "function": {"name": name, "arguments": text}}
