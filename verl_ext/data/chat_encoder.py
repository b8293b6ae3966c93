"""Turns rows of a parquet file into token ids and the mask of what is learnt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime, time
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from verl_ext.data.config import ChatDataConfig
from verl_ext.data.parquet import place_of, plain
from verl_ext.data.template import ChatTemplate, Encoded, Message, clock_arguments
from verl_ext.errors import UserError

ASSISTANTS_OWN = ("tool_calls", "reasoning_content", "thinking")
"""Keys of an assistant turn, other than its content, that hold text which the model wrote."""
Tokens = tuple[np.ndarray, np.ndarray]
"""Token ids (seq,) int32, and 1 for each that is learnt (seq,) uint8."""


class ChatEncoder:
    """Renders chats, tokenises them and cuts them to length; can be sent to another process.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        config: the `data` section.
        now: whose date a chat template with `strftime_now` is given; None for today's.

    Attributes:
        date: that date, at midnight, so that tokens depend on nothing finer; None for templates that do not ask.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: ChatDataConfig, now: datetime | None = None) -> None:
        self.config = config
        date = datetime.combine(now or datetime.now(), time())
        clock = clock_arguments(tokenizer.chat_template, date)
        self.date = date if clock else None
        self.template = ChatTemplate(tokenizer, {**clock, **config.apply_chat_template_kwargs})
        source = str(tokenizer.chat_template)
        self.not_rendered = [key for key in ASSISTANTS_OWN if not re.search(rf"\b{key}\b", source)]

    def encode(self, name: str, first: int, records: list[dict[str, Any]]) -> list[Tokens]:
        """Tokens of some rows.

        Args:
            name: of the file, for messages.
            first: number of the first row in it.
            records: the rows, by column.

        Raises:
            UserError: a row that cannot be rendered, has no assistant turn, or is too long with `truncation=error`; the
                message names file and row.
        """
        return list(self._encode(name, first, records))

    def _encode(self, name: str, first: int, records: list[dict[str, Any]]) -> Iterator[Tokens]:
        places = [place_of(name, first + i, record) for i, record in enumerate(records)]
        chats = [self._at(place, self._messages, record) for place, record in zip(places, records)]
        columns = [self._at(place, self._columns, record) for place, record in zip(places, records)]
        for place, item in zip(places, self.template.encode(chats, columns)):
            tokens, mask = self._at(place, self._truncate, item)
            yield np.asarray(tokens, dtype=np.int32), np.asarray(mask, dtype=np.uint8)

    def _at(self, place: str, function: Callable[[Any], Any], argument: Any) -> Any:
        """Call a function on a row; what goes wrong names the row's place."""
        try:
            return function(argument)
        except (UserError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{place} cannot be used: {error}") from error

    def _messages(self, record: dict[str, Any]) -> list[Message]:
        if self.config.multiturn.enable:
            messages = plain(record[self.config.multiturn.messages_key])
        else:
            prompt = pick(record[self.config.prompt_key], self.config.prompt_dict_keys)
            response = pick(record[self.config.response_key], self.config.response_dict_keys)
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        chat = check_chat(messages)
        lost = next((key for key in self.not_rendered if any(turn.get(key) for turn in chat)), None)
        if lost is not None:
            raise UserError(f"it has {lost}, which the chat template omits; set data.chat_template to one that has it")
        return chat

    def _columns(self, record: dict[str, Any]) -> dict[str, Any]:
        keys = {"tools": self.config.multiturn.tools_key, "enable_thinking": self.config.multiturn.enable_thinking_key}
        found = {name: plain(record[key]) for name, key in keys.items() if key in record}
        if isinstance(found.get("tools"), str):  # how tools of differing shape fit in one parquet column
            try:
                found["tools"] = json.loads(found["tools"])
            except (ValueError, RecursionError) as error:
                raise UserError(f"its column '{keys['tools']}' is not JSON ({error}); write a list of tools") from error
        return {name: value for name, value in found.items() if value is not None}

    def _truncate(self, encoded: Encoded) -> tuple[list[int], list[int]]:
        if isinstance(encoded, UserError):
            raise encoded
        (tokens, mask), limit = encoded, self.config.max_length
        if len(tokens) <= limit:
            return tokens, mask
        if self.config.truncation == "error":
            raise UserError(
                f"it has {len(tokens)} tokens, more than data.max_length={limit}; "
                "raise it, set data.truncation=right, or drop the row"
            )
        return (tokens[:limit], mask[:limit]) if self.config.truncation == "right" else (tokens[-limit:], mask[-limit:])


def check_chat(messages: Any) -> list[Message]:
    """The turns of a chat with text for content, or a `UserError` that says which turn is wrong."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError("its messages are no list of turns with role and content; prepare the file anew")
    check_turns(messages)
    for turn, message in enumerate(messages):
        weight = message.get("weight")
        is_given = weight is not None and weight == weight  # a parquet file may hold NaN for none
        if message["role"] == "assistant" and is_given and weight != 1:
            raise UserError(
                f"turn {turn} has weight {weight}, but training ignores weights; drop the row, or cut off "
                "the chat before this turn"
            )
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError("it has no assistant turn; drop the row from the file")
    if messages[0]["role"] == "assistant":
        raise UserError("it begins with the assistant; put a user or system turn before it")
    return messages


def check_turns(messages: list[dict[str, Any]]) -> None:
    """Bring turns, in place, to text for content and objects for the arguments of tool calls.

    Raises:
        UserError: a turn that cannot be rendered.
    """
    for turn, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise UserError(f"turn {turn} has no role; give it user, assistant, system or tool")
        message["content"] = text_of(message.get("content"), turn)
        for call in message.get("tool_calls") or ():
            decode_arguments(call, turn)
        if message["content"] is None and not message.get("tool_calls"):
            raise UserError(f"turn {turn} has no content; drop the row from the file")


def decode_arguments(call: Any, turn: int) -> None:
    """Turn the JSON text of a tool call's arguments, OpenAI's form, into the object that templates render as JSON.

    vLLM does the same before it renders a chat.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            raise UserError(f"turn {turn} has a tool call whose arguments are not JSON ({error}); correct it") from None


def text_of(content: Any, turn: int) -> str | None:
    """A turn's content as text; a list of text parts is joined."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise UserError(f"turn {turn} has content that is not text; this stage trains on text alone")
    return content


def pick(value: Any, keys: Any) -> Any:
    """Descend into a nested column by `prompt_dict_keys` or `response_dict_keys`, as verl does into lists of one."""
    for key in keys or ():
        while isinstance(value, np.ndarray) and len(value) == 1:
            value = value[0]
        value = value[key]
    return value
