"""Renders a chat with the tokenizer's template and says which characters the model is to learn."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from verl_ext.data.training_templates import NAMES, comparable, marks_generation, read_chat_template
from verl_ext.errors import UserError
from verl_ext.rendering import EndlessTemplate, rendering

Message = Mapping[str, Any]
Encoded = tuple[list[int], list[int]] | UserError
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError, IndexError)
"""What rendering a chat can raise: templates refuse rows themselves, and fail on rows that they do not expect."""
ANSWER = "The sum is 3."
PROBE = [{"role": "user", "content": "Add 1 and 2."}, {"role": "assistant", "content": ANSWER}]
SYSTEM = {"role": "system", "content": "Be brief."}
ADVICE = (
    "set data.chat_template to a Jinja file that marks assistant turns with {% generation %}, or to one of "
    f"{', '.join(NAMES)}"
)


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template with the keyword arguments that every rendering gets.

    Attributes:
        tokenizer: a fast tokenizer with a chat template.
        kwargs: passed to the template, `data.apply_chat_template_kwargs`.
    """

    tokenizer: PreTrainedTokenizerBase
    kwargs: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise UserError(
                f"the tokenizer has no chat template; set data.chat_template to one of {', '.join(NAMES)}, or to a "
                "Jinja file, or take the instruct variant of the model"
            )
        if not self.tokenizer.is_fast:
            raise UserError(
                "the tokenizer is a slow one without character offsets; convert it to a tokenizer.json first"
            )

    def render(self, messages: Sequence[Message], *, prompt: bool = False, **columns: Any) -> str:
        """The text of a chat; with `prompt` it ends where the assistant would begin to write.

        Raises:
            UserError: where the last turn ends cannot be told, see `unconditional_prompt`.
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
        """The generation prompt of a template that ends every chat with it, as the original Llama 3 template does.

        Empty for templates that follow `add_generation_prompt`, and for those whose user turn ends with the prompt.

        Raises:
            UserError: there is one, but no special token separates an answer from it.
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
        # Turns of all roles may begin alike, so the prompt may begin before the two texts part.
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

    def _apply(self, messages: Sequence[Message], prompt: bool, columns: Mapping[str, Any]) -> str:
        with rendering():
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt, **{**self.kwargs, **columns}
            )

    def encode(self, chats: Sequence[Sequence[Message]], columns: Sequence[Mapping[str, Any]]) -> list[Encoded]:
        """Tokens of chats and which of them count in the loss.

        Args:
            chats: the turns of each, with `role` and `content`.
            columns: `tools`, `enable_thinking` and the like for each chat, handed to the template.

        Returns:
            For each chat its token ids (seq,) and a mask (seq,) that is 1 on what the assistant writes, its end-of-turn
            token included; or, for a chat that the template refuses or renders differently once later turns follow, a
            `UserError` (returned, so that the caller can name the row).
        """
        rendered: list[Any] = []
        for chat, more in zip(chats, columns):
            is_endless = bool(rendered) and isinstance(rendered[-1], EndlessTemplate)  # each chat would take as long
            rendered.append(rendered[-1] if is_endless else self._guarded(self._text_and_spans, chat, more))
        texts = ["" if isinstance(item, UserError) else item[0] for item in rendered]
        tokens = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        return [
            item if isinstance(item, UserError) else (ids, loss_mask(offsets, item[1]))
            for item, ids, offsets in zip(rendered, tokens["input_ids"], tokens["offset_mapping"])
        ]

    def _guarded(self, function: Callable[..., Any], messages: Sequence[Message], columns: Mapping[str, Any]) -> Any:
        try:
            return function(messages, **columns)
        except TEMPLATE_ERRORS as error:
            return UserError(f"the chat template refuses it ({error}); fix the row, or set another data.chat_template")
        except UserError as error:
            return error

    def _text_and_spans(self, messages: Sequence[Message], **columns: Any) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, and which characters of it the assistant writes: the marked ones, if there are marks."""
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
                if not (after.startswith(before) and text.startswith(after)):
                    raise UserError(
                        f"the chat template renders turn {i} differently once later turns follow; {self._advice()}"
                    )
                # The line break that templates put behind the end-of-turn token is never sampled, so not learnt.
                spans.append((len(before), max(len(before), len(after.rstrip()))))
        return text, spans

    def _advice(self) -> str:
        """What to set in the place of a template that changes earlier turns."""
        template = self.tokenizer.get_chat_template()
        like = [
            name for name in NAMES if renders_alike(self.tokenizer, template, read_chat_template(name), self.kwargs)
        ]
        if like:
            return f"set data.chat_template={like[0]}, which renders every turn as this template renders the last one"
        return f"{ADVICE}, or split the chat"


def clock_arguments(template: object, now: datetime | None) -> dict[str, Any]:
    """Arguments with which a template's `strftime_now` tells another time than the clock's.

    Args:
        template: the source, or several by name.
        now: the time that it tells; None leaves the clock's, as for templates that do not ask.
    """
    # the argument takes the place of transformers' function of that name
    return {"strftime_now": now.strftime} if now is not None and "strftime_now" in str(template) else {}


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The texts of a tokenizer's special tokens."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {*added, *tokenizer.all_special_tokens}


def renders_alike(
    tokenizer: PreTrainedTokenizerBase, one: str, other: str, kwargs: Mapping[str, Any], *, whole: bool = True
) -> bool:
    """Whether two templates agree on chats of one round, with and without a system turn.

    Args:
        tokenizer: whose special tokens they may name.
        one: a template.
        other: a template.
        kwargs: `data.apply_chat_template_kwargs`.
        whole: compare the answer too, not only the prompt.
    """
    chat = [{"role": "user", "content": "Add 1 and 2."}, {"role": "assistant", "content": "3"}]
    chats = [chat, [{"role": "system", "content": "Be brief."}, *chat]]
    rendered = []
    for template in (one, other):
        options = {"tokenize": False, "chat_template": template, **kwargs}
        try:
            with rendering():
                prompts = [tokenizer.apply_chat_template(c[:-1], add_generation_prompt=True, **options) for c in chats]
                texts = [tokenizer.apply_chat_template(c, **options) for c in chats] if whole else []
        except (TemplateError, EndlessTemplate):
            return False
        rendered.append([comparable(text) for text in prompts + texts])
    return rendered[0] == rendered[1]


def loss_mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """1 for each token that overlaps a span of characters.

    A token begins at the end of the one before it, since some tokenizers trim white space off the offsets, and a token
    of white space alone would then cover nothing; or earlier, with a character of which it holds some of the bytes.

    Args:
        offsets: (start, end) of each token in characters, ascending.
        spans: (start, end) of what counts, ascending and disjoint.
    """
    mask, remaining, previous_end = [], list(reversed(spans)), 0
    for start, end in offsets:
        begin = min(start, previous_end)
        while remaining and remaining[-1][1] <= begin:
            remaining.pop()
        mask.append(int(bool(remaining) and end > remaining[-1][0]))
        previous_end = max(previous_end, end)
    return mask
