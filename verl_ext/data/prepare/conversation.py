"""Converts an input row to a checked conversation: a `messages` list plus the row's other columns.

Conversations have OpenAI's layout (`role` and `content`), ShareGPT's (`from` and `value`), or are pairs of columns,
such as Alpaca's `instruction` and `output`. The converted turns have OpenAI's layout with text content. A row is
refused if any of its text would be lost.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.chat_text import DEVELOPER, FUNCTION_CALL, ROLES, SHAREGPT_ROLES, decoded_turns
from verl_ext.commands import program
from verl_ext.data.config import MESSAGES_KEYS, PREFERENCE_KEYS, PROMPT_KEYS, RESPONSE_KEYS, SYSTEM_KEYS
from verl_ext.data.dataset import ORIGIN_KEY
from verl_ext.data.prepare.tables import Row, RowError
from verl_ext.errors import UserError
from verl_ext.suggestions import similar_name

INPUT_KEYS = ("input", "context")
"""Columns that continue an `instruction`."""
HISTORY_KEY = "history"
TOOLS_KEY = "tools"
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
METADATA_KEYS = re.compile(
    r"(.*_)?(id|ids|idx|index|uuid|uid|hash|url|uri|link|date|time|timestamp|created|created_at|source|sources|dataset|"
    r"origin|split|category|categories|topic|topics|subject|domain|field|task|type|kind|family|level|difficulty|grade|"
    r"language|lang|locale|license|tag|tags|keywords|label|labels|name|file|filename|path|version|model|generator|"
    r"author|annotator|quality|score|scores|rating|status|metadata|meta|extra_info|ability)",
    re.IGNORECASE,
)
"""Text columns that describe a conversation without being part of it."""
VERDICT_KEYS = ("label", "kto_tag")
"""Columns that are false for a rejected answer, in data for KTO."""
FALSE_TEXTS = {"label": ("false",), "kto_tag": ("false", "0", "0.0")}
"""False as text, which is all that CSV files hold. A label 0 may also be a class."""
TURN_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "id", "index")
"""Accepted keys of a turn. Other non-null keys are refused: they may hold text, or exclude the turn from training."""


# Columns


@dataclass(frozen=True)
class ChatColumns:
    """Names of the columns to read; None tries the usual names.

    Attributes:
        messages: column of the turns.
        prompt: column of the user's text.
        response: column of the assistant's text.
        metadata: text columns that are not part of the conversation.
    """

    messages: str | None
    prompt: str | None
    response: str | None
    metadata: tuple[str, ...]


@dataclass(frozen=True)
class ChatLayout:
    """How the rows of a file store conversations.

    Attributes:
        name: name of the layout, for messages.
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
        """Columns that every row must have."""
        return (self.prompt, self.response) if self.messages is None else (self.messages,)

    def describe(self, row: Row) -> str:
        """Name of the layout, and its columns in a row."""
        present = [name for name in (self.columns[0], *self.optional, *self.columns[1:]) if name in row]
        return f"{self.name} layout ({', '.join(present)})"


def detect_layout(row: Row, keys: ChatColumns) -> ChatLayout:
    """Detect how a row stores its conversation.

    Raises:
        RowError: a named column is missing, or no usual column is present.
    """
    named_pair = keys.prompt is not None or keys.response is not None
    messages = None if named_pair else _find_column(row, keys.messages, MESSAGES_KEYS)
    if messages is not None:
        name = "ShareGPT" if _is_sharegpt(from_json_text(row[messages])) else "OpenAI"
        return ChatLayout(name, messages=messages, optional=(*SYSTEM_KEYS, TOOLS_KEY))
    prompt = _find_column(row, keys.prompt, PROMPT_KEYS)
    if prompt == "prompt" and keys.prompt is None and row.get("instruction") is not None:
        raise RowError("it has both 'prompt' and 'instruction'", "specify the one to use with --prompt-key")
    response = _find_column(row, keys.response, [key for key in RESPONSE_KEYS if key != prompt])
    if response is None and {*PREFERENCE_KEYS} <= row.keys():
        is_chat = _is_whole_chat(from_json_text(row["chosen"]))
        option, key = ("--messages-key", "multiturn.messages_key") if is_chat else ("--response-key", "response_key")
        raise RowError(
            "it has a chosen and a rejected answer, but training on preferences is not supported",
            f"train on the chosen answers with the option {option} chosen (for SFT data.{key}=chosen)",
        )
    if row.keys() == {"text"}:
        raise RowError(
            "it has only plain text, and training needs chats", "split each text into a prompt and a response"
        )
    if prompt is None or response is None:
        similar = {name: similar_name(name, (*MESSAGES_KEYS, *PROMPT_KEYS, *RESPONSE_KEYS)) for name in sorted(row)}
        typos = [f"'{name}' to '{meant}'" for name, meant in similar.items() if meant not in (None, name)]
        raise RowError(
            f"its columns {', '.join(sorted(row))} contain no known conversation layout",
            f"{f'rename {typos[0]}, or ' if typos else ''}specify them with --messages-key, or with --prompt-key and "
            "--response-key (for SFT data.multiturn.messages_key, or data.prompt_key and data.response_key)",
        )
    if prompt == "instruction":
        inputs = tuple(key for key in INPUT_KEYS if key != response)
        return ChatLayout("Alpaca", None, prompt, response, (*inputs, *SYSTEM_KEYS, HISTORY_KEY, TOOLS_KEY))
    return ChatLayout(f"{prompt}/{response}", None, prompt, response, (*SYSTEM_KEYS, HISTORY_KEY, TOOLS_KEY))


def _find_column(row: Row, named: str | None, usual: Sequence[str]) -> str | None:
    if named is None:
        return next((key for key in usual if row.get(key) is not None), None)
    if row.get(named) is None:
        raise RowError(f"its column {named!r} is missing or null; its columns are {', '.join(sorted(row))}")
    return named


def to_conversation(
    row: Row, _number: int, notes: Counter[str], *, layout: ChatLayout | None, keys: ChatColumns
) -> Row:
    """Convert one row to the `messages` format.

    Args:
        notes: counts the modified rows, by description of the change.
        layout: layout of the file; None if no row has a known layout.

    Returns:
        The row with `messages` in place of the columns of the conversation.

    Raises:
        RowError: the row has another layout, a malformed turn, no assistant turn, or text outside the turns.
    """
    layout = layout or detect_layout(row, keys)
    _check_layout(row, layout, keys)
    messages = to_turns(_extract_turns(row, layout), notes)
    check_turns(messages)
    used = (*layout.columns, *layout.optional)
    rest = {name: value for name, value in row.items() if name not in used}
    rest.pop(ORIGIN_KEY, None)
    is_pair = layout.messages is None and all(isinstance(row[name], str) for name in layout.columns)
    metadata = (*keys.metadata, "rejected") if "chosen" in layout.columns else keys.metadata
    _refuse_lost_text(rest, [row.get(name) for name in used] if is_pair else [], messages, metadata)
    _refuse_rejected_answer(rest, metadata)
    tools = _tools(row.get(TOOLS_KEY))
    rest.pop("messages", None)  # a metadata column that the conversation replaces
    return {"messages": messages, **rest, **({} if tools is None else {TOOLS_KEY: tools})}


def _check_layout(row: Row, layout: ChatLayout, keys: ChatColumns) -> None:
    missing = [name for name in layout.columns if row.get(name) is None]
    try:
        found = detect_layout(row, keys) if missing or layout.messages is not None else layout
    except RowError:
        found = layout
    if found != layout:
        raise RowError(
            f"it has the {found.describe(row)}, unlike the rows before it ({layout.name})",
            "move such rows to a separate file",
        )
    if missing:
        raise RowError(f"its column {missing[0]!r} is missing or null")


def _extract_turns(row: Row, layout: ChatLayout) -> list[Any]:
    if layout.messages is not None:
        turns = from_json_text(from_turns_text(row[layout.messages]))
        if not isinstance(turns, list):
            raise RowError(f"its column {layout.messages!r} is not a list of turns")
    else:
        response = _column_turns(row[layout.response], "assistant")
        turns = [*_history(row.get(HISTORY_KEY)), *_prompt_turns(row, layout), *response]
    system = [name for name in SYSTEM_KEYS if row.get(name)]
    if not all(isinstance(row[name], str) for name in system):
        raise RowError(f"its column {system[0]!r} is not text")
    texts = {row[name] for name in system if row[name].strip()}
    if not texts or _begins_with_system(turns, texts):
        return turns
    roles = [turn.get("role", turn.get("from")) for turn in turns if isinstance(turn, dict)]
    if len(texts) > 1 or "system" in roles:
        raise RowError(f"its column {system[0]!r} differs from its other system prompt; keep one")
    return [{"role": "system", "content": texts.pop()}, *turns]


def _begins_with_system(turns: list[Any], texts: set[str]) -> bool:
    first = turns[0] if turns and isinstance(turns[0], dict) else {}
    if first.get("role", first.get("from")) != "system":
        return False
    return [_join_text_parts(first.get("content", first.get("value")), "turn 1")] == [*texts]


def _prompt_turns(row: Row, layout: ChatLayout) -> list[Any]:
    """The user's turns; an instruction and its input are joined with a blank line."""
    further = [name for name in INPUT_KEYS if name in layout.optional and _has_text(row.get(name))]
    prompt = row[layout.prompt]
    if not further:
        return _column_turns(prompt, "user")
    texts = [prompt, *(row[name] for name in further)]
    if not all(isinstance(text, str) for text in texts):
        raise RowError(f"its columns {', '.join([layout.prompt, *further])} are not all text")
    return _column_turns("\n\n".join(text for text in texts if text.strip()), "user")


def _history(value: Any) -> Iterator[Row]:
    """Turns of earlier rounds, which LLaMA-Factory's Alpaca files store as pairs of prompt and answer."""
    rounds = from_json_text(value)
    if rounds is None or rounds == "":
        return
    if not (isinstance(rounds, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in rounds)):
        raise RowError(f"its column {HISTORY_KEY!r} is not a list of pairs of a prompt and an answer")
    for prompt, answer in rounds:
        yield {"role": "user", "content": prompt}
        yield {"role": "assistant", "content": answer}


def _column_turns(value: Any, role: str) -> list[Any]:
    """Convert a column to turns; it holds a text, or in TRL's conversational format a list of turns."""
    turns = from_turns_text(value)
    is_list = isinstance(turns, list) and any(
        isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in turns
    )
    return turns if is_list else [{"role": role, "content": value}]


def _tools(value: Any) -> list[Any] | None:
    tools = from_json_text(value)
    if tools is None or tools == "" or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"its column {TOOLS_KEY!r} is not a list of tools, or JSON text of one")
    return tools


def _refuse_lost_text(rest: Row, used: list[Any], messages: list[Row], metadata: Collection[str]) -> None:
    """Refuse columns with text outside the turns, unless they are metadata.

    Args:
        used: values of the columns of the conversation if they are a pair of texts.
    """
    for name, value in rest.items():
        if name in MEDIA_KEYS and value:
            raise RowError(f"it has {name}, but only text can be trained on", "remove the column, or drop such rows")
        if name in metadata or not _has_text(value):
            continue
        if METADATA_KEYS.fullmatch(name) or _is_repeated(value, used, messages):
            continue
        raise RowError(
            f"its column {name!r} is not part of the conversation, so its text would not be trained on",
            f"remove the column, or keep it with the option --metadata {shlex.quote(name)} of "
            f"`{program('prepare')} chat`",
        )


def _refuse_rejected_answer(rest: Row, metadata: Collection[str]) -> None:
    for name in VERDICT_KEYS:
        verdict = str(rest.get(name)).strip().lower()
        if verdict in FALSE_TEXTS[name] and name not in metadata:
            raise RowError(
                f"its column {name!r} is {verdict}, which marks a rejected answer, and SFT would train on it",
                f"drop such rows with the option --skip-bad of `{program('prepare')} chat`, or keep them with "
                f"--metadata {name}",
            )


def _has_text(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return bool(value.strip())
    if isinstance(value, dict):
        return any(map(_has_text, value.values()))
    return isinstance(value, list) and any(map(_has_text, value))


def _is_repeated(value: Any, used: list[Any], messages: list[Row]) -> bool:
    """Whether a text occurs in a turn, or repeats the whole row, like the column `text` of the original Alpaca data."""
    if not isinstance(value, str):
        return False
    contents = [message["content"] or "" for message in messages]
    parts = [part.strip() for part in used if isinstance(part, str) and part.strip()]
    whole = parts if parts else contents
    return any(value.strip() in content for content in contents) or all(part in value for part in whole)


# Turns


def to_turns(value: Any, notes: Counter[str]) -> list[Row]:
    """Convert the turns of a chat to OpenAI's layout; `check_turns` checks the chat as a whole.

    Args:
        value: a list of turns in OpenAI's or ShareGPT's layout, or its JSON text.
        notes: counts the modified rows, by description of the change.

    Returns:
        Turns with `role` and `content`; content parts are joined, and arguments of tool calls are JSON text.

    Raises:
        RowError: the value is not such a list, or some of its text would be lost.
    """
    turns = from_json_text(value)
    if not isinstance(turns, list) or not turns:
        raise RowError("it is not a list of turns, or is empty")
    checked = [_to_turn(turn, f"turn {position}") for position, turn in enumerate(turns, start=1)]
    roles = {turn["role"] for turn in checked}
    if DEVELOPER in roles:
        if "system" in roles:
            raise RowError("it has both system and developer turns", "merge them into one system turn")
        # Chat templates do not know the role: Qwen's drop the turn, ChatML's render a role that the model never saw.
        notes["developer turns became system turns"] += 1
        checked = [{**turn, "role": "system"} if turn["role"] == DEVELOPER else turn for turn in checked]
    return checked


def check_turns(messages: list[Row], *, is_prompt: bool = False) -> None:
    """Apply the checks of training to converted turns, so that all prepared data can be trained on.

    Args:
        messages: turns from `to_turns`.
        is_prompt: whether the model answers the chat; otherwise it is trained on the assistant's turns.

    Raises:
        RowError: there is no turn to train on or to answer.
    """
    from verl_ext.data.chat_template import check_messages  # here, because its imports slow down every launch

    try:
        check_messages(messages, is_prompt=is_prompt)
    except UserError as error:
        raise _row_error(error) from error


def _row_error(error: UserError) -> RowError:
    reason, _, fix = str(error).partition("; ")
    return RowError(reason, fix)


def from_json_text(value: Any) -> Any:
    """Decode JSON text, which CSV files use for lists; return anything else unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def from_turns_text(value: Any) -> Any:
    """Decode a text that is a JSON list of turns; return anything else unchanged.

    Raises:
        RowError: a text begins like a list of turns, but is not JSON.
    """
    try:
        return decoded_turns(value)
    except UserError as error:
        raise _row_error(error) from error


def _is_sharegpt(turns: Any) -> bool:
    first = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, dict) and {"from", "value"} <= first.keys()


def _is_whole_chat(turns: Any) -> bool:
    """Whether a value is a list of turns that does not begin with the assistant."""
    first = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, dict) and SHAREGPT_ROLES.get(str(first.get("role", first.get("from")))) != "assistant"


def _to_turn(turn: Any, where: str) -> Row:
    if isinstance(turn, list) and all(isinstance(pair, tuple) for pair in turn):
        turn = dict(turn)  # pyarrow returns a map as a list of pairs
    if not isinstance(turn, dict):
        raise RowError(f"{where} is not an object with role and content")
    turn = {name: value for name, value in turn.items() if value is not None or name == "content"}
    if "from" in turn and "role" not in turn:
        turn = _from_sharegpt(turn, where)
    if turn.get("role") not in (*ROLES, DEVELOPER):
        raise RowError(f"{where} has the role {turn.get('role')!r}, not one of {', '.join((*ROLES, DEVELOPER))}")
    if turn["role"] != "assistant" or turn.get("weight") == 1:  # only the assistant's turns are trained on
        turn.pop("weight", None)
    if "weight" in turn:
        raise RowError(
            f"{where} has the weight {turn['weight']!r}, but training ignores 'weight'",
            "drop the row, or end its chat before this turn",
        )
    unknown = [name for name in turn if name not in TURN_KEYS]
    if unknown and turn.get("content") is None and not turn.get("tool_calls"):
        raise RowError(f"{where} has no content, but the unknown key {unknown[0]!r}", "rename the key to 'content'")
    if unknown:
        raise RowError(f"{where} has the key {unknown[0]!r}, which training ignores", "remove the key or the row")
    turn["content"] = _join_text_parts(turn.get("content"), where)
    if calls := turn.pop("tool_calls", None):
        turn["tool_calls"] = [_to_tool_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]
    _check_content(turn, where)
    return turn


def _from_sharegpt(turn: Row, where: str) -> Row:
    role = SHAREGPT_ROLES.get(str(turn["from"]))
    if role is None:
        raise RowError(f"{where} is from {turn['from']!r}, not one of {', '.join(SHAREGPT_ROLES)}")
    rest = {name: value for name, value in turn.items() if name not in ("from", "value", "content")}
    if turn.get("content") is not None:
        raise RowError(f"{where} has both 'value' and 'content'", "remove one")
    value = turn.get("value")
    if role != FUNCTION_CALL:
        return {**rest, "role": role, "content": value}
    calls = from_json_text(value)
    return {**rest, "role": "assistant", "content": "", "tool_calls": [calls] if isinstance(calls, dict) else calls}


def _join_text_parts(content: Any, where: str) -> Any:
    """Join the text parts of a content; return anything but a list of parts unchanged.

    Raises:
        RowError: a part is not text, such as an image.
    """
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RowError(f"{where} has a content part of type {kind!r}, but only text can be trained on")
    return "".join(part["text"] for part in content)


def _to_tool_call(call: Any, where: str) -> Row:
    """Convert the arguments of a tool call to JSON text: parquet would give all calls the same argument names."""
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str):
        arguments = from_json_text(arguments) if arguments.strip() else {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise RowError(f"{where} has a tool call that is not an object with name and arguments")
    named = {"id": call["id"]} if call.get("id") is not None else {}
    text = json.dumps(arguments, ensure_ascii=False)
    return {**named, "type": "function", "function": {"name": name, "arguments": text}}


def _check_content(turn: Row, where: str) -> None:
    content, has_calls = turn["content"], bool(turn.get("tool_calls"))
    if has_calls and turn["role"] != "assistant":
        raise RowError(f"{where} has tool_calls but the role {turn['role']!r}, not assistant")
    if content is None and has_calls:
        return
    if not isinstance(content, str):
        fix = "put it in quotes" if isinstance(content, (int, float)) else None
        raise RowError(f"{where} has content of type {type(content).__name__}, not text", fix)
    if turn["role"] == "assistant" and not content.strip() and not has_calls:
        raise RowError(f"{where} is an empty assistant turn")
