"""Renders a chat with the tokenizer's template and says which characters the model is to learn."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from verl_ext.errors import UserError

Message = Mapping[str, Any]
Encoded = tuple[list[int], list[int]] | UserError


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
                "the tokenizer has no chat template; set data.chat_template to a Jinja file, "
                "or take the instruct variant of the model"
            )
        if not self.tokenizer.is_fast:
            raise UserError(
                "the tokenizer is a slow one without character offsets; convert it to a tokenizer.json first"
            )

    @property
    def marks_generation(self) -> bool:
        """Whether the template itself marks assistant turns with `{% generation %}`."""
        return re.search(r"\{%-?\s*generation\b", str(self.tokenizer.chat_template)) is not None

    def render(self, messages: Sequence[Message], *, prompt: bool = False, **columns: Any) -> str:
        """The text of a chat; with `prompt` it ends where the assistant would begin to write."""
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
        if self.marks_generation:
            return [self._guarded(self._encode_marked, chat, more) for chat, more in zip(chats, columns)]
        rendered = [self._guarded(self._text_and_spans, chat, more) for chat, more in zip(chats, columns)]
        texts = ["" if isinstance(item, UserError) else item[0] for item in rendered]
        tokens = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        return [
            item if isinstance(item, UserError) else (ids, loss_mask(offsets, item[1]))
            for item, ids, offsets in zip(rendered, tokens["input_ids"], tokens["offset_mapping"])
        ]

    def _guarded(self, function: Callable[..., Any], messages: Sequence[Message], columns: Mapping[str, Any]) -> Any:
        try:
            return function(messages, **columns)
        except (
            TemplateError,
            TypeError,
            ValueError,
            KeyError,
            IndexError,
        ) as error:  # a template can raise any of them
            return UserError(f"the chat template refuses it ({error}); mend the row or set data.chat_template")
        except UserError as error:
            return error

    def _encode_marked(self, messages: Sequence[Message], **columns: Any) -> tuple[list[int], list[int]]:
        encoded = self.tokenizer.apply_chat_template(
            list(messages), return_dict=True, return_assistant_tokens_mask=True, **{**self.kwargs, **columns}
        )
        return encoded["input_ids"], encoded["assistant_masks"]

    def _text_and_spans(self, messages: Sequence[Message], **columns: Any) -> tuple[str, list[tuple[int, int]]]:
        text, spans = self.render(messages, **columns), []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:i], prompt=True, **columns)
                after = self.render(messages[: i + 1], **columns) if i + 1 < len(messages) else text
                if not (after.startswith(before) and text.startswith(after)):
                    raise UserError(
                        f"the chat template renders turn {i} differently once later turns follow; set "
                        "data.chat_template to one that marks assistant turns with {% generation %}, or split the chat"
                    )
                # The line break that templates put behind the end-of-turn token is never sampled, so not learnt.
                spans.append((len(before), max(len(before), len(after.rstrip()))))
        return text, spans


def loss_mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """1 for each token that overlaps a span of characters.

    A token reaches from the end of the one before it to its own end, since some tokenizers trim white space off the
    offsets, and a token of white space alone would then cover nothing.

    Args:
        offsets: (start, end) of each token in characters, ascending.
        spans: (start, end) of what counts, ascending and disjoint.
    """
    mask, remaining, previous_end = [], list(reversed(spans)), 0
    for _, end in offsets:
        while remaining and remaining[-1][1] <= previous_end:
            remaining.pop()
        mask.append(int(bool(remaining) and end > remaining[-1][0]))
        previous_end = max(previous_end, end)
    return mask
