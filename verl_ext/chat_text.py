"""Names of the roles in chats, and chats that are stored as text, as CSV files do."""

from __future__ import annotations

import json
import re
from typing import Any

from verl_ext.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
DEVELOPER = "developer"
"""OpenAI's newer name of the role system; converted to it."""
FUNCTION_CALL = "function_call"
SHAREGPT_ROLES = {
    **{role: role for role in (*ROLES, DEVELOPER, FUNCTION_CALL)},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant"},
    **{"observation": "tool", "function_response": "tool"},
}
_KEYS, _CONTENT = {"role", "from"}, {"content", "value", "tool_calls"}
"""Keys of turns, of which each turn has at least one."""
_OBJECTS = re.compile(r"\s*\[\s*\{")
"""The start of a list of objects."""
_TURNS = re.compile(
    r"""\s*\[\s*\{\s*(?:["'](?:content|value)["']\s*:.*?)?"""
    rf"""["'](?:role|from)["']\s*:\s*["'](?:{"|".join(SHAREGPT_ROLES)})["']""",
    re.DOTALL,
)
"""The start of a list of turns, as JSON or as Python prints it."""


def decoded_turns(value: Any) -> Any:
    """Decode a text that is a JSON list of turns; return anything else unchanged.

    Raises:
        UserError: a text begins like a list of turns, but is not JSON.
    """
    if not isinstance(value, str) or not _OBJECTS.match(value):
        return value
    try:
        turns = json.loads(value)
    except (ValueError, RecursionError) as error:
        if _TURNS.match(value):
            raise UserError(
                f"it has turns as text that is not JSON ({error}), such as Python's notation; store them as JSON, in "
                "pandas with df[column].map(json.dumps)"
            ) from error
        return value
    return turns if _are_turns(turns) else value


def _are_turns(items: list[Any]) -> bool:
    """Whether a list holds turns, and not other objects that have a role, such as persons."""
    are_turns = all(isinstance(item, dict) and _KEYS & item.keys() and _CONTENT & item.keys() for item in items)
    return are_turns and any(str(item.get("role", item.get("from"))) in SHAREGPT_ROLES for item in items)
