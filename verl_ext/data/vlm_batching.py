"""Makes micro-batches of chats about images, for the processors of the Qwen family.

The data loader only groups the chats. At which tier a group is seen depends on the step, so its tensors are made there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch
from jinja2 import TemplateError
from torch.nn.utils.rnn import pad_sequence
from transformers import ProcessorMixin

from verl_ext.data.batching import MicroBatch
from verl_ext.data.chat_template import clock_arguments
from verl_ext.data.image_chats import ImageChat
from verl_ext.errors import UserError
from verl_ext.rendering import rendering


@dataclass(frozen=True)
class ChatBatch:
    """What one rank is to learn from in one step.

    Attributes:
        groups: chats that share a forward pass, as rows of an `ImageChatDataset`.
        rows: number of each chat in the data set.
    """

    groups: list[list[dict[str, Any]]]
    rows: list[int]


@dataclass(frozen=True)
class VLMBatcher:
    """Groups chats in the order they come; the data loader's `collate_fn`.

    Attributes:
        processor: of the model.
        micro_batch_size: chats per forward pass on one rank.
        tier_sizes: most pixels that an image is scaled to, ascending.
        end_token: ends an answer.
        now: the time that a chat template with `strftime_now` is given; None for that of the clock.
    """

    processor: ProcessorMixin
    micro_batch_size: int
    tier_sizes: tuple[int, ...]
    end_token: int
    now: datetime | None = None

    def __call__(self, samples: Sequence[dict[str, Any]]) -> ChatBatch:
        size = self.micro_batch_size
        groups = [list(samples[start : start + size]) for start in range(0, len(samples), size)]
        return ChatBatch(groups, [sample["row"] for sample in samples])

    def micro_batch(self, samples: Sequence[dict[str, Any]]) -> MicroBatch:
        """A micro-batch at the highest tier."""
        return self.at(samples, len(self.tier_sizes) - 1)

    def at(self, samples: Sequence[dict[str, Any]], tier: int) -> MicroBatch:
        """A micro-batch at a tier, with what the model is given of the images.

        Returns:
            `input_ids`, `attention_mask`, `loss_mask` and `mm_token_type_ids` (1 for a part of an image), each of
            (batch, seq); `pixel_values` and `image_grid_thw` as the image processor gives them.
        """
        chats = [sample["chat"] for sample in samples]
        images = self.processor.image_processor(
            [chat.questions[0].opened() for chat in chats], size=self.size(tier), return_tensors="pt"
        )
        merged = images["image_grid_thw"].prod(-1) // self.processor.image_processor.merge_size**2
        rows = [self.tokens(chat, int(count)) for chat, count in zip(chats, merged, strict=True)]
        lengths = torch.tensor([len(tokens) for tokens, _ in rows])
        input_ids = pad_sequence([tokens for tokens, _ in rows], batch_first=True, padding_value=self.end_token)
        return {
            "input_ids": input_ids,
            "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long(),
            "loss_mask": pad_sequence([learnt for _, learnt in rows], batch_first=True),
            "mm_token_type_ids": (input_ids == self.processor.image_token_id).int(),
            "pixel_values": images["pixel_values"],
            "image_grid_thw": images["image_grid_thw"],
        }

    def check(self, chats: Iterable[ImageChat]) -> None:
        """Refuse chats that the template cannot continue; a step would find them on one rank alone.

        Raises:
            UserError: the first of them.
        """
        for chat in chats:
            if len(chat.questions) > 1:
                self._turns(chat)

    def tokens(self, chat: ImageChat, num_image_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids (seq,) of a chat, and 1 for those that are learnt: answers with what ends them."""
        tokenizer = self.processor.tokenizer
        ids: list[int] = []
        learnt: list[int] = []
        for prompt, answer in self._turns(chat):
            prompt = prompt.replace(self.processor.image_token, self.processor.image_token * num_image_tokens)
            asked = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            said = [*tokenizer(answer, add_special_tokens=False)["input_ids"], self.end_token]
            ids += asked + said
            learnt += [0] * len(asked) + [1] * len(said)
        return torch.tensor(ids), torch.tensor(learnt)

    def size(self, tier: int) -> dict[str, int]:
        """What the image processor is told of a tier; see `QwenVLAdapter.inputs`."""
        least = self.processor.image_processor.size["shortest_edge"]
        return {"shortest_edge": min(least, self.tier_sizes[tier]), "longest_edge": self.tier_sizes[tier]}

    def _turns(self, chat: ImageChat) -> list[tuple[str, str]]:
        """What stands before each answer, from behind what ended the last one; and the answer.

        Raises:
            UserError: the template refuses the chat, does not end, or renders earlier turns differently once later
                turns follow.
        """
        clock = clock_arguments(self.processor.chat_template, self.now)
        messages: list[dict[str, Any]] = []
        turns, written = [], ""
        for number, (question, answer) in enumerate(zip(chat.questions, chat.answers, strict=True)):
            parts = [{"type": "text", "text": question.question}]
            messages.append({"role": "user", "content": [{"type": "image"}, *parts] if number == 0 else parts})
            try:
                with rendering():
                    text = self.processor.apply_chat_template(
                        messages, add_generation_prompt=True, tokenize=False, **clock
                    )
            except TemplateError as error:
                raise UserError(
                    f"the chat template refuses {question.sample_id} ({error}); fix the row, or the model's template"
                ) from error
            if not text.startswith(written):
                raise UserError(
                    f"the chat template changes the answer to {chat.questions[number - 1].sample_id}, "
                    f"{chat.answers[number - 1]!r}, when another question follows; "
                    "set data.questions_per_chat=1"
                )
            turns.append((text.removeprefix(written), answer))
            messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
            written = text + answer + self.processor.tokenizer.decode([self.end_token])
        return turns
