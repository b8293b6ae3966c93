"""Converts chats to token ids and loss masks.

Imports transformers only to render, because the preparation commands check chats without it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, time
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from verl_ext.chat_text import DEVELOPER, ROLES
from verl_ext.data.config import ChatDataConfig
from verl_ext.data.dataset import conversion_advice, drop_nulls, place_of, require_columns
from verl_ext.data.training_templates import TEMPLATE_NAMES, marks_generation, read_chat_template, without_date
from verl_ext.errors import UserError
from verl_ext.rendering import EndlessTemplate, rendering

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

Message = Mapping[str, Any]
Rendered = tuple[str, list[tuple[int, int]]]
"""The text of a chat, and the spans that the assistant writes."""
Encoded = tuple[list[int], list[int]] | UserError
Tokens = tuple[np.ndarray, np.ndarray, bool]
"""Token ids (seq,) int32, the loss mask (seq,) uint8, and whether the sample is truncated."""
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError, IndexError)
"""Errors that rendering can raise: templates refuse some rows, and fail on rows that they do not expect."""
ASSISTANT_TEXT_KEYS = ("tool_calls", "reasoning_content", "thinking")
"""Keys of an assistant turn, in addition to its content, that hold text of the model."""
ANSWER = "The sum is 3."
PROBE = [{"role": "user", "content": "Add 1 and 2."}, {"role": "assistant", "content": ANSWER}]
SYSTEM = {"role": "system", "content": "Be brief."}
ADVICE = (
    "set data.chat_template to a Jinja file that marks assistant turns with {% generation %}, or to one of "
    f"{', '.join(TEMPLATE_NAMES)}"
)


def check_messages(messages: Any, column: str = "messages", *, is_prompt: bool = False) -> list[dict[str, Any]]:
    """Convert a chat to the form that chat templates expect: content as text, arguments of tool calls as objects.

    Args:
        messages: the value in a row; it is not modified.
        column: name of the column, for error messages.
        is_prompt: whether the model answers the chat; otherwise it is trained on the assistant's turns.

    Raises:
        UserError: the chat cannot be rendered, or has no turn to train on or to answer.
    """
    command = "prompts" if is_prompt else "chat"
    if messages is None:
        fix = f"drop the row, or {conversion_advice(command, '--skip-bad ')}"
        raise UserError(f"its column '{column}' is null; {fix}")
    is_chat = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    if not is_chat or not messages:
        fix = conversion_advice(command, "--skip-bad " if is_chat else "")
        raise UserError(f"its column '{column}' is not a list of turns with role and content; {fix}")
    turns = [_check_turn(message, turn) for turn, message in enumerate(messages)]
    if any(turn["role"] == DEVELOPER for turn in turns):  # few templates know the role
        if any(turn["role"] == "system" for turn in turns):
            raise UserError("it has both system and developer turns; merge them into one system turn")
        turns = [{**turn, "role": "system"} if turn["role"] == DEVELOPER else turn for turn in turns]
    if is_prompt:
        if turns[-1]["role"] == "assistant":
            raise UserError("its last turn is the assistant's; end a prompt with a user turn")
        return turns
    if not any(turn["role"] == "assistant" for turn in turns):
        raise UserError("it has no assistant turn; drop the row from the file")
    if turns[0]["role"] == "assistant":
        raise UserError("it begins with the assistant; put a user or system turn before it")
    for turn, message in enumerate(turns):
        is_empty = not _has_text(message) and not any(message.get(name) for name in ASSISTANT_TEXT_KEYS)
        if message["role"] == "assistant" and is_empty:
            fix = f"drop the row, or {conversion_advice(command, '--skip-bad ')}"
            raise UserError(f"turn {turn} is an empty assistant turn; {fix}")
        weight = message.get("weight")
        is_given = weight is not None and weight == weight  # a parquet file may hold NaN instead of null
        if message["role"] == "assistant" and is_given and weight != 1:
            raise UserError(
                f"turn {turn} has weight {weight}, but training ignores weights; drop the row, or cut off "
                "the chat before this turn"
            )
    return turns


def _check_turn(message: dict[str, Any], turn: int) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        fix = conversion_advice("chat") if "from" in message else "set it to user, assistant, system or tool"
        raise UserError(f"turn {turn} has no role; {fix}")
    checked = {**message, "content": _content_text(message.get("content"), turn)}
    calls = checked.pop("tool_calls", None)  # some templates, such as Llama 3.1's, test only whether the key is there
    if calls:
        checked["tool_calls"] = [_decode_arguments(call, turn) for call in calls]
    elif checked["content"] is None:
        raise UserError(f"turn {turn} has no content; drop the row from the file")
    return checked


def _has_text(turn: Message) -> bool:
    return bool((turn["content"] or "").strip())


def _probe(turn: Message, number: int, is_prompt: bool) -> tuple[str, ...]:
    """The parts of a turn's content, with each text replaced by a unique one; empty if the turn has no text.

    The content of an assistant turn to train on is split at the marks of reasoning, at which templates split it, too.
    A prompt may lose reasoning, as it does when the model generates its next turn.
    """
    if not _has_text(turn):
        return ()
    splits = turn["role"] == "assistant" and not is_prompt
    parts = re.split("(</?think>)", turn["content"]) if splits else [turn["content"]]
    named = enumerate(parts)
    return tuple(part if place % 2 or not part.strip() else f"Text{number}x{place}x" for place, part in named)


def _content_text(content: Any, turn: int) -> str | None:
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise UserError(f"turn {turn} has content that is not text; this stage trains on text alone")
    return content


def _decode_arguments(call: Any, turn: int) -> Any:
    """Decode the arguments of a tool call from JSON text (OpenAI's format), since templates render objects as JSON.

    vLLM does the same before it renders a chat.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise UserError(f"turn {turn} has a tool call whose arguments are not JSON ({error}); correct it") from None
    decoded = {**function, "arguments": arguments}
    return {**call, "function": decoded} if "function" in call else decoded


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template with constant keyword arguments.

    Attributes:
        tokenizer: a fast tokenizer with a chat template.
        kwargs: arguments for every rendering, such as `data.apply_chat_template_kwargs`.
    """

    tokenizer: PreTrainedTokenizerBase
    kwargs: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise UserError(
                f"the tokenizer has no chat template; set data.chat_template to one of {', '.join(TEMPLATE_NAMES)}, or "
                "to a Jinja file, or use the instruct variant of the model"
            )
        if not self.tokenizer.is_fast:
            raise UserError(
                "the tokenizer is a slow tokenizer without character offsets; convert it to a tokenizer.json first"
            )

    def render(self, messages: Sequence[Message], *, prompt: bool = False, **columns: Any) -> str:
        """Render a chat as text; with `prompt`, the text ends with the generation prompt.

        Raises:
            UserError: the end of the last turn cannot be found, see `unconditional_prompt`.
        """
        text = self._apply(messages, prompt, columns)
        always = "" if prompt else self.unconditional_prompt
        if not always:
            return text
        if not text.endswith(always):
            raise UserError(f"the chat template ends only some chats with {always!r}; {ADVICE}")
        return text.removesuffix(always)

    @cached_property
    def unconditional_prompt(self) -> str:
        """The generation prompt of a template that ends every chat with it, like the original Llama 3 template.

        Empty for templates that follow `add_generation_prompt`, and for templates whose user turn ends with the prompt.

        Raises:
            UserError: the template ends every chat with a prompt that no special token separates from an answer.
        """
        for chat in (PROBE, [SYSTEM, *PROBE]):  # some templates require a system turn
            with suppress(*TEMPLATE_ERRORS):
                return self._unconditional_prompt(chat)
        return ""

    def _unconditional_prompt(self, chat: Sequence[Message]) -> str:
        text, unanswered = self._apply(chat, False, {}), self._apply(chat[:-1], False, {})
        longer = self._apply([*chat, {"role": "user", "content": "Thanks."}], False, {})
        shared, start = len(os.path.commonprefix([text, longer])), text.rfind(ANSWER) + len(ANSWER)
        follows_flag = ANSWER not in text or text != self._apply(chat, True, {})
        if follows_flag or not start <= shared < len(text) or not unanswered.endswith(text[shared:]):
            return ""
        # Turns of all roles may have a common start, so the prompt may begin before the two texts differ.
        tokens = [(text.find(token, start), token) for token in special_tokens(self.tokenizer)]
        first = min([(place, place + len(token)) for place, token in tokens if place >= 0], default=(shared, shared))
        if first[0] < first[1] <= shared:
            return text[first[1] :].lstrip()
        if text[start : min(shared, first[0])].strip():
            raise UserError(
                f"the chat template ends every chat with {text[start:]!r}, so the end of an answer cannot be found; "
                f"{ADVICE}"
            )
        return text[start:].lstrip()

    def require_rendered(
        self, chat: Sequence[Message], columns: Mapping[str, Any] | None = None, *, prompt: bool = False
    ) -> None:
        """Refuse a chat that the template would not render completely; renders once per sequence of roles.

        Args:
            chat: turns from `check_messages`.
            columns: template arguments of the chat, such as `tools`.
            prompt: whether the chat is rendered with the generation prompt.

        Raises:
            UserError: the template omits a turn, a text of an assistant turn, or the tools, or knows no such role.
        """
        source, columns = str(self.tokenizer.chat_template), columns or {}
        given = [key for turn in chat for key in ASSISTANT_TEXT_KEYS if turn.get(key)]
        given += ["tools"] * bool(columns.get("tools"))
        if lost := next((key for key in given if not re.search(rf"\b{key}\b", source)), None):
            raise UserError(
                f"it has {lost}, which the chat template omits; set data.chat_template to one that renders {lost}"
            )
        shape = (
            *((turn["role"], *_probe(turn, 0, prompt), bool(turn.get("tool_calls"))) for turn in chat),
            *((key, key == "tools" or value) for key, value in columns.items()),
            prompt,
        )
        if shape in self._rendered_shapes:
            return
        for number, turn in enumerate(chat):
            if turn["role"] not in ROLES and not re.search(rf"""['"]{re.escape(turn["role"])}['"]""", source):
                raise UserError(
                    f"turn {number} has the role {turn['role']!r}; set it to {', '.join(ROLES)} or a role that the "
                    "chat template names"
                )
        if (omitted := self._omitted_turn(chat, columns, prompt)) is not None:
            role, is_split = chat[omitted]["role"], len(_probe(chat[omitted], 0, prompt)) > 1
            text = "reasoning or other text" if is_split else "the text"
            fix = "drop the row" if role == "assistant" else "put the text at the beginning of a user turn"
            raise UserError(
                f"the chat template omits {text} of turn {omitted}, whose role is {role}; set data.chat_template to "
                f"one that renders it, or {fix}"
            )
        self._rendered_shapes.add(shape)

    @cached_property
    def _rendered_shapes(self) -> set[Hashable]:
        """Chats without omitted turns, as the roles of their turns, their parts, and whether they have tool calls."""
        return set()

    def _omitted_turn(self, chat: Sequence[Message], columns: Mapping[str, Any], prompt: bool) -> int | None:
        """The first turn with text that makes no difference; None if the template refuses the chat.

        Templates may drop the text of an earlier assistant turn, usually its reasoning, if they render it at the end.
        """
        probes = [_probe(turn, number, prompt) for number, turn in enumerate(chat)]

        def text_with(changed: str | None = None, end: int | None = None) -> str:
            turns = []
            for turn, parts in zip(chat[:end], probes):
                content = "".join("Other" if part == changed else part for part in parts)
                turns.append({**turn, "content": content} if parts else turn)
            return self._apply(turns, prompt and end is None, columns)

        with suppress(*TEMPLATE_ERRORS):  # reported when the row itself is rendered
            text = text_with()
            for number, (turn, parts) in enumerate(zip(chat, probes)):
                for part in parts:
                    if not part.startswith("Text") or part in text or text_with(part) != text:
                        continue
                    if turn["role"] != "assistant" or part not in text_with(end=number + 1):
                        return number
        return None

    @property
    def trained_header(self) -> str:
        """The text before each answer that is trained on, because the template ignores `add_generation_prompt`.

        Empty for templates that follow it or mark answers, and for templates whose prompt ends where an answer begins.
        """
        if not marks_generation(self.tokenizer.get_chat_template()):
            for chat in (PROBE, [SYSTEM, *PROBE]):  # some templates require a system turn
                with suppress(UserError, *TEMPLATE_ERRORS):  # reported for the first row, which it affects, too
                    prompt, text = self.render(chat[:-1], prompt=True), self.render(chat)
                    header = text.removeprefix(prompt).partition(ANSWER)[0]
                    return header.strip() if prompt == self.render(chat[:-1]) and text.startswith(prompt) else ""
        return ""

    @property
    def turn_end(self) -> str:
        """The special token that the template writes after an answer; empty if it writes none, several or text."""
        for chat in (PROBE, [SYSTEM, *PROBE]):  # some templates require a system turn
            with suppress(UserError, *TEMPLATE_ERRORS):
                end = self.render(chat).rpartition(ANSWER)[2].strip()
                return end if end in special_tokens(self.tokenizer) else ""
        return ""

    def _apply(self, messages: Sequence[Message], prompt: bool, columns: Mapping[str, Any]) -> str:
        with rendering():
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt, **{**self.kwargs, **columns}
            )

    def encode(self, chats: Sequence[Sequence[Message]], columns: Sequence[Mapping[str, Any]]) -> list[Encoded]:
        """Tokenize chats and compute their loss masks.

        Args:
            chats: turns of each chat, with `role` and `content`.
            columns: template arguments of each chat, such as `tools` and `enable_thinking`.

        Returns:
            For each chat, its token ids (seq,) and a mask (seq,) that is 1 for the assistant's tokens, including the
            end-of-turn token. If the template refuses the chat, or renders a turn differently once later turns follow,
            a `UserError` instead, so that the caller can name the row.
        """
        rendered: list[Rendered | UserError] = []
        for chat, more in zip(chats, columns):
            is_endless = bool(rendered) and isinstance(rendered[-1], EndlessTemplate)  # it affects every chat
            rendered.append(rendered[-1] if is_endless else self._try_rendering(chat, more))
        texts = ["" if isinstance(item, UserError) else item[0] for item in rendered]
        tokens = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        return [
            item if isinstance(item, UserError) else (ids, loss_mask(offsets, item[1]))
            for item, ids, offsets in zip(rendered, tokens["input_ids"], tokens["offset_mapping"])
        ]

    def _try_rendering(self, messages: Sequence[Message], columns: Mapping[str, Any]) -> Rendered | UserError:
        try:
            return self._text_and_spans(messages, **columns)
        except TEMPLATE_ERRORS as error:
            return UserError(
                f"the chat template cannot render it ({error}); fix the row, or set another data.chat_template"
            )
        except UserError as error:
            return error

    def _text_and_spans(self, messages: Sequence[Message], **columns: Any) -> Rendered:
        """Render a chat and find the assistant's spans, from the template's marks if it has any."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.tokenizer.get_chat_template(tools=columns.get("tools"))
        if marks_generation(template):
            arguments = {**self.tokenizer.special_tokens_map, **self.kwargs, **columns}
            with rendering():
                [text], [marked] = render_jinja_template(
                    [list(messages)], chat_template=template, return_assistant_tokens_mask=True, **arguments
                )
            return text, marked
        text, spans = self.render(messages, **columns), []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:i], prompt=True, **columns)
                after = self.render(messages[: i + 1], **columns) if i + 1 < len(messages) else text
                if not after.startswith(before) and after.startswith(self.render(messages[:i], **columns)):
                    rest = before[len(os.path.commonprefix([before, after])) :]
                    raise UserError(
                        f"the chat template's generation prompt ends with {rest!r}, which the template does not write "
                        f"before the answer in turn {i}; {ADVICE}"
                    )
                if not (after.startswith(before) and text.startswith(after)):
                    raise UserError(
                        f"the chat template renders turn {i} differently once later turns follow; {self._advice()}"
                    )
                # The newline that templates write after the end-of-turn token is never sampled, so it has no loss.
                spans.append((len(before), max(len(before), len(after.rstrip()))))
        return text, spans

    def _advice(self) -> str:
        """How to fix a template that changes earlier turns."""
        template = self.tokenizer.get_chat_template()
        like = [
            name
            for name in TEMPLATE_NAMES
            if renders_alike(self.tokenizer, template, read_chat_template(name), self.kwargs)
        ]
        if like:
            return f"set data.chat_template={like[0]}, which renders every turn like this template's last turn"
        return f"{ADVICE}, or split the chat"


def clock_arguments(template: object, now: datetime | None) -> dict[str, Any]:
    """Template arguments that set the time of `strftime_now`; empty for templates that do not call it.

    Args:
        template: source text, or several source texts by name.
        now: the time; None for the current time.
    """
    # the argument shadows transformers' function of the same name
    return {"strftime_now": now.strftime} if now is not None and "strftime_now" in str(template) else {}


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The texts of a tokenizer's special tokens."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {*added, *tokenizer.all_special_tokens}


def renders_alike(
    tokenizer: PreTrainedTokenizerBase, one: str, other: str, kwargs: Mapping[str, Any], *, whole: bool = True
) -> bool:
    """Whether two templates render single-round chats identically, with and without a system turn.

    Args:
        tokenizer: defines the special tokens that the templates may use.
        kwargs: `data.apply_chat_template_kwargs`.
        whole: compare the answer too, not only the prompt.
    """
    chats = [PROBE, [SYSTEM, *PROBE]]
    rendered = []
    for template in (one, other):
        options = {"tokenize": False, "chat_template": template, **kwargs}
        try:
            with rendering():
                prompts = [tokenizer.apply_chat_template(c[:-1], add_generation_prompt=True, **options) for c in chats]
                texts = [tokenizer.apply_chat_template(c, **options) for c in chats] if whole else []
        except (TemplateError, EndlessTemplate):
            return False
        rendered.append([without_date(text) for text in prompts + texts])
    return rendered[0] == rendered[1]


def loss_mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Compute a mask that is 1 for each token that overlaps a span.

    A token counts from the end of the previous one, because some tokenizers trim white space from the offsets, so that
    a white space token would be empty. It starts earlier if it shares a multi-byte character with an earlier token.

    Args:
        offsets: (start, end) of each token in characters, ascending.
        spans: (start, end) of the assistant's characters, ascending and disjoint.
    """
    mask, remaining, previous_end = [], list(reversed(spans)), 0
    for start, end in offsets:
        begin = min(start, previous_end)
        while remaining and remaining[-1][1] <= begin:
            remaining.pop()
        mask.append(int(bool(remaining) and end > remaining[-1][0]))
        previous_end = max(previous_end, end)
    return mask


class ChatEncoder:
    """Renders, tokenizes and truncates the chats of a file; can be sent to another process.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        now: provides the date for a chat template with `strftime_now`; None for today.

    Attributes:
        date: that date at midnight, so that tokens do not depend on the time of day; None for templates that do not
            use it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: ChatDataConfig, now: datetime | None) -> None:
        self.config = config
        date = datetime.combine(now or datetime.now(), time())
        clock = clock_arguments(tokenizer.chat_template, date)
        self.date = date if clock else None
        self.template = ChatTemplate(tokenizer, {**clock, **config.apply_chat_template_kwargs})

    def encode(self, name: str, first: int, records: list[dict[str, Any]]) -> list[Tokens]:
        """Tokenize consecutive rows of a file.

        Args:
            name: name of the file, for error messages.
            first: index of the first row in the file.
            records: rows as values by column.

        Raises:
            UserError: a row cannot be rendered, has no assistant turn, or is too long with `truncation=error`; the
                message names the file and the row.
        """
        places = [place_of(name, first + i, record) for i, record in enumerate(records)]
        chats = [self._at(place, self._messages, record) for place, record in zip(places, records)]
        columns = [self._at(place, self._columns, record) for place, record in zip(places, records)]
        for place, chat, more in zip(places, chats, columns):
            self._at(place, partial(self.template.require_rendered, chat), more)
        encoded = zip(places, self.template.encode(chats, columns))
        samples = [self._at(place, self._truncate, item) for place, item in encoded]
        return [
            (np.asarray(tokens, dtype=np.int32), np.asarray(mask, dtype=np.uint8), truncated)
            for tokens, mask, truncated in samples
        ]

    def _at(self, place: str, function: Callable[[Any], Any], argument: Any) -> Any:
        """Call a function on a row, and add the row's file and number to errors."""
        try:
            return function(argument)
        except (UserError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{place} cannot be used: {error}") from error

    def _messages(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        require_columns("it", record, self.config.columns)
        multiturn = self.config.multiturn
        if multiturn.enable:
            return check_messages(drop_nulls(record[multiturn.messages_key]), multiturn.messages_key)
        prompt = pick(record[self.config.prompt_key], self.config.prompt_dict_keys)
        response = pick(record[self.config.response_key], self.config.response_dict_keys)
        return check_messages([{"role": "user", "content": prompt}, {"role": "assistant", "content": response}])

    def _columns(self, record: dict[str, Any]) -> dict[str, Any]:
        keys = {"tools": self.config.multiturn.tools_key, "enable_thinking": self.config.multiturn.enable_thinking_key}
        found = {name: drop_nulls(record[key]) for name, key in keys.items() if key in record}
        if isinstance(found.get("tools"), str):  # JSON text, because a parquet column has a single type
            try:
                found["tools"] = json.loads(found["tools"] or "[]")
            except (ValueError, RecursionError) as error:
                raise UserError(f"its column '{keys['tools']}' is not JSON ({error}); write a list of tools") from error
        # Some templates, such as Llama 3.1's, write the prompt for tools also for an empty list.
        return {name: value for name, value in found.items() if value is not None and value != []}

    def _truncate(self, encoded: Encoded) -> tuple[list[int], list[int], bool]:
        if isinstance(encoded, UserError):
            raise encoded
        (tokens, mask), limit = encoded, self.config.max_length
        if len(tokens) <= limit:
            return tokens, mask, False
        if self.config.truncation == "error":
            raise UserError(
                f"it has {len(tokens)} tokens, more than data.max_length={limit}; "
                "raise it, set data.truncation=right, or drop the row"
            )
        kept = slice(limit) if self.config.truncation == "right" else slice(-limit, None)
        return tokens[kept], mask[kept], True


def pick(value: Any, keys: Sequence[str] | None) -> Any:
    """Select a nested column value by `prompt_dict_keys` or `response_dict_keys`; unwraps lists of one like verl.

    Raises:
        UserError: the value has no such field.
    """
    for key in keys or ():
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
        if not isinstance(value, Mapping) or key not in value:
            known = f"its fields there are {', '.join(value)}" if isinstance(value, Mapping) else "it is not a struct"
            fix = "correct data.prompt_dict_keys or data.response_dict_keys"
            raise UserError(f"it has no field '{key}'; {known}; {fix}")
        value = value[key]
    return value


def stop_token_ids(settings: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens at which vLLM stops: the EOS tokens of the generation config and the tokenizer."""
    named = None if settings is None else settings.eos_token_id
    listed = named if isinstance(named, list) else [named]
    return list(dict.fromkeys(token for token in (*listed, tokenizer.eos_token_id) if token is not None))
