"""One input row becomes one checked conversation: a `messages` list plus the row's other columns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.commands import program
from verl_ext.data.dataset import ORIGIN_KEY
from verl_ext.data.prepare.files import Row
from verl_ext.data.prepare.turns import BadRow, from_json, is_sharegpt, to_turns

MESSAGES_KEYS = ("messages", "conversation", "conversations")
INPUT_KEYS = ("input", "context")
"""Columns that continue an `instruction`."""
PROMPT_KEYS = ("prompt", "instruction", "question", "query", "input")
RESPONSE_KEYS = ("response", "completion", "answer", "output")
SYSTEM_KEYS = ("system", "system_prompt")
HISTORY_KEY = "history"
TOOLS_KEY = "tools"
COMMAND = f"{program('prepare')} chat"
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
METADATA = re.compile(
    r"(.*_)?(id|ids|idx|index|uuid|uid|hash|url|uri|link|date|time|timestamp|created|created_at|source|sources|dataset|"
    r"origin|split|category|categories|topic|topics|subject|domain|field|task|type|kind|family|level|difficulty|grade|"
    r"language|lang|locale|license|tag|tags|keywords|label|labels|name|file|filename|path|version|model|generator|"
    r"author|annotator|quality|score|scores|rating|status|metadata|meta|extra_info|ability)",
    re.IGNORECASE,
)
"""Columns of text that describe a conversation and are not part of it."""


@dataclass(frozen=True)
class ColumnKeys:
    """Names of the columns to read; a name that is None is found among the usual ones.

    Attributes:
        messages: column of the turns.
        prompt: column of the user's text.
        response: column of the assistant's text.
        metadata: columns of text that are not part of the conversation.
    """

    messages: str | None = None
    prompt: str | None = None
    response: str | None = None
    metadata: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """How the rows of a file hold conversations.

    Attributes:
        name: for people.
        messages: column of the turns; None for a pair of columns.
        prompt: column of the user's text or turns.
        response: column of the assistant's text or turns.
        optional: further columns that a row may have.
    """

    name: str
    messages: str | None = None
    prompt: str = ""
    response: str = ""
    optional: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Those that a row must have."""
        return (self.prompt, self.response) if self.messages is None else (self.messages,)

    def describe(self, row: Row) -> str:
        """Name and columns, as the first row of a file has them."""
        present = [name for name in (self.columns[0], *self.optional, *self.columns[1:]) if name in row]
        return f"{self.name} layout ({', '.join(present)})"


def detect_layout(row: Row, keys: ColumnKeys) -> Layout:
    """Detect how a row holds its conversation.

    Raises:
        BadRow: a named column is missing, or no usual ones are there.
    """
    named_pair = keys.prompt is not None or keys.response is not None
    messages = None if named_pair else _find(row, keys.messages, MESSAGES_KEYS)
    if messages is not None:
        turns = from_json(row[messages]) if isinstance(row[messages], str) else row[messages]
        name = "ShareGPT" if is_sharegpt(turns) else "OpenAI"
        return Layout(name, messages=messages, optional=(*SYSTEM_KEYS, TOOLS_KEY))
    prompt = _find(row, keys.prompt, PROMPT_KEYS)
    if prompt == "prompt" and keys.prompt is None and row.get("instruction") is not None:
        raise BadRow("it has both 'prompt' and 'instruction'", "name the one to use by --prompt-key")
    response = _find(row, keys.response, [key for key in RESPONSE_KEYS if key != prompt])
    if prompt is None or response is None:
        raise BadRow(
            f"no conversation is found in its columns {', '.join(sorted(row))}",
            "name them by --messages-key, or by --prompt-key and --response-key (for SFT "
            "data.multiturn.messages_key, or data.prompt_key and data.response_key)",
        )
    if prompt == "instruction":
        inputs = tuple(key for key in INPUT_KEYS if key != response)
        return Layout("Alpaca", None, prompt, response, (*inputs, *SYSTEM_KEYS, HISTORY_KEY, TOOLS_KEY))
    return Layout(f"{prompt}/{response}", None, prompt, response, (*SYSTEM_KEYS, HISTORY_KEY, TOOLS_KEY))


def to_conversation(row: Row, layout: Layout, keys: ColumnKeys, notes: Counter[str]) -> Row:
    """Check one row and bring it to the `messages` format.

    Args:
        row: the decoded row.
        layout: of its file.
        keys: the columns that hold the conversation.
        notes: counts the rows in which something was changed, by a description of it.

    Returns:
        The row with `messages` in place of the columns that held the conversation.

    Raises:
        BadRow: the row has another layout, a malformed turn, no assistant turn, or text that is in no turn.
    """
    _check_layout(row, layout, keys)
    messages = to_turns(_extract(row, layout), notes)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("it has no assistant turn")
    if messages[0]["role"] == "assistant":
        raise BadRow("it begins with the assistant", "put a user or system turn before it")
    used = (*layout.columns, *layout.optional)
    rest = {name: value for name, value in row.items() if name not in used}
    rest.pop(ORIGIN_KEY, None)
    _refuse_lost_text(rest, [row.get(name) for name in used], messages, keys.metadata)
    tools = _tools(row.get(TOOLS_KEY))
    rest.pop("messages", None)  # named as metadata; its place is taken
    return {"messages": messages, **rest, **({} if tools is None else {TOOLS_KEY: tools})}


def require_object(value: Any) -> Row:
    """A row as it was read.

    Raises:
        BadRow: it could not be read, or is no object.
    """
    if isinstance(value, ValueError):
        raise BadRow(str(value))
    if not isinstance(value, dict):
        raise BadRow(f"it is a {type(value).__name__}, not an object")
    return value


def _find(row: Row, named: str | None, usual: Sequence[str]) -> str | None:
    if named is None:
        return next((key for key in usual if row.get(key) is not None), None)
    if row.get(named) is None:
        raise BadRow(f"its column {named!r} is missing or null; its columns are {', '.join(sorted(row))}")
    return named


def _check_layout(row: Row, layout: Layout, keys: ColumnKeys) -> None:
    missing = [name for name in layout.columns if row.get(name) is None]
    try:
        found = detect_layout(row, keys) if missing or layout.messages is not None else layout
    except BadRow:
        found = layout
    if found != layout:
        raise BadRow(
            f"it has the {found.describe(row)}, unlike the rows before it ({layout.name})",
            "put such rows into a file of their own",
        )
    if missing:
        raise BadRow(f"its column {missing[0]!r} is missing or null")


def _extract(row: Row, layout: Layout) -> list[Any]:
    if layout.messages is not None:
        turns = from_json(row[layout.messages]) if isinstance(row[layout.messages], str) else row[layout.messages]
        if not isinstance(turns, list):
            raise BadRow(f"its column {layout.messages!r} is not a list of turns")
    else:
        turns = [*_history(row.get(HISTORY_KEY)), *_prompt(row, layout), *_turns(row[layout.response], "assistant")]
    system = [name for name in SYSTEM_KEYS if row.get(name)]
    if not all(isinstance(row[name], str) for name in system):
        raise BadRow(f"its column {system[0]!r} is not text")
    texts = {row[name] for name in system if row[name].strip()}
    if not texts or _begins_with(turns, texts):
        return turns
    if len(texts) > 1 or any(
        isinstance(turn, dict) and turn.get("role", turn.get("from")) == "system" for turn in turns
    ):
        raise BadRow(f"its column {system[0]!r} differs from its other system prompt; keep one")
    return [{"role": "system", "content": texts.pop()}, *turns]


def _begins_with(turns: list[Any], texts: set[str]) -> bool:
    first = turns[0] if turns and isinstance(turns[0], dict) else {}
    return first.get("role", first.get("from")) == "system" and {first.get("content", first.get("value"))} == texts


def _prompt(row: Row, layout: Layout) -> list[Any]:
    """The user's turns; instruction and input are joined by a blank line."""
    further = [name for name in INPUT_KEYS if name in layout.optional and _has_text(row.get(name))]
    prompt = row[layout.prompt]
    if not further:
        return _turns(prompt, "user")
    texts = [prompt, *(row[name] for name in further)]
    if not all(isinstance(text, str) for text in texts):
        raise BadRow(f"its columns {', '.join([layout.prompt, *further])} are not all text")
    return _turns("\n\n".join(text for text in texts if text.strip()), "user")


def _history(value: Any) -> Iterator[Row]:
    """Earlier rounds, as LLaMA-Factory's Alpaca files hold them: pairs of a prompt and an answer."""
    rounds = from_json(value) if isinstance(value, str) else value
    if rounds is None or rounds == "":
        return
    pairs = isinstance(rounds, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in rounds)
    if not pairs:
        raise BadRow(f"its column {HISTORY_KEY!r} is not a list of pairs of a prompt and an answer")
    for prompt, answer in rounds:
        yield {"role": "user", "content": prompt}
        yield {"role": "assistant", "content": answer}


def _turns(value: Any, role: str) -> list[Any]:
    """A column as turns: text, or in TRL's conversational form a list of them."""
    turns = from_json(value) if isinstance(value, str) and value.startswith("[{") else value
    is_list = isinstance(turns, list) and any(isinstance(turn, dict) and "role" in turn for turn in turns)
    return turns if is_list else [{"role": role, "content": value}]


def _tools(value: Any) -> list[Any] | None:
    tools = from_json(value) if isinstance(value, str) else value
    if tools is None or tools == "" or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"its column {TOOLS_KEY!r} is not a list of tools, or JSON text of one")
    return tools


def _refuse_lost_text(rest: Row, used: list[Any], messages: list[Row], metadata: Collection[str]) -> None:
    """Refuse columns of text that is in no turn, unless they are metadata."""
    for name, value in rest.items():
        if name in MEDIA_KEYS and value:
            raise BadRow(f"it has {name}, and only text can be trained on", "remove the column, or leave out such rows")
        if name in metadata or not _has_text(value):
            continue
        if METADATA.fullmatch(name) or _is_repeated(value, used, messages):
            continue
        raise BadRow(
            f"its column {name!r} is not part of the conversation, so its text would not be trained on",
            f"remove the column, or keep it with the option --metadata {name} of `{COMMAND}`",
        )


def _has_text(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return bool(value.strip())
    if isinstance(value, dict):
        return any(map(_has_text, value.values()))
    return isinstance(value, list) and any(map(_has_text, value))


def _is_repeated(value: Any, used: list[Any], messages: list[Row]) -> bool:
    """Whether a text occurs in a turn, or repeats the whole row, as the column `text` of the original Alpaca data."""
    if not isinstance(value, str):
        return False
    contents = [message["content"] or "" for message in messages]
    parts = [part.strip() for part in used if isinstance(part, str)]
    whole = parts if parts else contents
    return any(value.strip() in content for content in contents) or all(part in value for part in whole)
