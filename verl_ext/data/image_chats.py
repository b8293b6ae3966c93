"""Combines questions about an image into chats, and builds their tensors, for processors of the Qwen family.

The data loader only groups the chats. The image size depends on the step, so the tensors are built in the trainer.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch.nn.utils.rnn import pad_sequence
from transformers import ProcessorMixin

from verl_ext.data.batching import MicroBatch
from verl_ext.data.chat_template import clock_arguments
from verl_ext.data.config import ImageChatDataConfig
from verl_ext.data.dataset import SampleDataset
from verl_ext.data.image_questions import ImageQuestion, image_size, load_image_questions, require_no_placeholders
from verl_ext.errors import UserError
from verl_ext.rendering import rendering


@dataclass(frozen=True)
class ImageChat:
    """Consecutive questions about one image."""

    questions: tuple[ImageQuestion, ...]

    @property
    def answers(self) -> list[str]:
        """The most frequent reference of each question; the first one wins a tie."""
        return [Counter(question.references).most_common(1)[0][0] for question in self.questions]


class ImageChatDataset(SampleDataset):
    """Samples with `row` and `chat`, an `ImageChat`.

    Args:
        samples: questions in any order.
        questions_per_chat: maximum number of questions about an image in one chat.

    Attributes:
        lengths: number of questions of each chat, (num_chats,).
    """

    def __init__(self, samples: Sequence[ImageQuestion], questions_per_chat: int) -> None:
        by_image: dict[str, list[ImageQuestion]] = {}
        for sample in samples:
            by_image.setdefault(image_key(sample.image), []).append(sample)
        self.chats = [
            ImageChat(tuple(questions[start : start + questions_per_chat]))
            for questions in by_image.values()
            for start in range(0, len(questions), questions_per_chat)
        ]
        self.lengths = np.array([len(chat.questions) for chat in self.chats])

    def __len__(self) -> int:
        return len(self.chats)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": index, "chat": self.chats[index]}

    def describe(self, indices: Iterable[int]) -> str:
        return ", ".join(self.chats[index].questions[0].sample_id for index in indices)


def image_key(image: Any) -> str:
    """A key that identifies an image within a dataset."""
    return hashlib.blake2b(image, digest_size=16).hexdigest() if isinstance(image, bytes) else str(image)


def load_image_chats(
    data: ImageChatDataConfig, progress: bool = False
) -> tuple[ImageChatDataset, ImageChatDataset | None]:
    """Load training and validation set; see `load_image_questions`.

    Raises:
        UserError: the data cannot be read, or has fewer chats than a batch.
    """
    train, val = load_image_questions(data, progress)
    chats = ImageChatDataset(train.samples, data.questions_per_chat)
    if len(chats) < data.train_batch_size:
        raise UserError(
            f"there are {len(chats)} chats to train on, fewer than data.train_batch_size={data.train_batch_size}; "
            "lower it, or add questions"
        )
    return chats, None if val is None else ImageChatDataset(val.samples, data.questions_per_chat)


@dataclass(frozen=True)
class ImageChatBatch:
    """One rank's data for a step.

    Attributes:
        groups: chats that share a forward pass, as samples of an `ImageChatDataset`.
        rows: index of each chat in the dataset.
    """

    groups: list[list[dict[str, Any]]]
    rows: list[int]


@dataclass(frozen=True)
class ImageChatCollator:
    """Groups consecutive chats, as the data loader's `collate_fn`, and builds the tensors of a group.

    Attributes:
        processor: processor of the model.
        micro_batch_size: chats per forward pass on one rank.
        tier_sizes: maximum number of pixels of an image at each tier, ascending.
        end_token: token that ends an answer.
        now: the time for a chat template with `strftime_now`; None for the current time.
    """

    processor: ProcessorMixin
    micro_batch_size: int
    tier_sizes: tuple[int, ...]
    end_token: int
    now: datetime | None

    def __call__(self, samples: Sequence[dict[str, Any]]) -> ImageChatBatch:
        size = self.micro_batch_size
        groups = [list(samples[start : start + size]) for start in range(0, len(samples), size)]
        return ImageChatBatch(groups, [sample["row"] for sample in samples])

    def micro_batch(self, samples: Sequence[dict[str, Any]]) -> MicroBatch:
        """Build the tensors of some chats at the highest tier."""
        return self.at(samples, len(self.tier_sizes) - 1)

    def at(self, samples: Sequence[dict[str, Any]], tier: int) -> MicroBatch:
        """Build the tensors of some chats at a tier.

        Returns:
            `input_ids`, `attention_mask`, `loss_mask` and `mm_token_type_ids` (1 for image tokens), each (batch, seq);
            `pixel_values` and `image_grid_thw` from the image processor.
        """
        chats = [sample["chat"] for sample in samples]
        images = self.processor.image_processor(
            [chat.questions[0].load_image() for chat in chats],
            size=image_size(self.processor, self.tier_sizes[tier]),
            return_tensors="pt",
        )
        merged = images["image_grid_thw"].prod(-1) // self.processor.image_processor.merge_size**2
        encoded = [self.tokens(chat, int(count)) for chat, count in zip(chats, merged, strict=True)]
        lengths = torch.tensor([len(tokens) for tokens, _ in encoded])
        input_ids = pad_sequence([tokens for tokens, _ in encoded], batch_first=True, padding_value=self.end_token)
        return {
            "input_ids": input_ids,
            "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long(),
            "loss_mask": pad_sequence([mask for _, mask in encoded], batch_first=True),
            "mm_token_type_ids": (input_ids == self.processor.image_token_id).int(),
            "pixel_values": images["pixel_values"],
            "image_grid_thw": images["image_grid_thw"],
        }

    def check(self, chats: Iterable[ImageChat]) -> None:
        """Refuse chats that the template cannot render, before a step fails on only one rank.

        Renders the first chat, and all with several questions.

        Raises:
            UserError: the template cannot render a chat, or a text contains the token of an image.
        """
        for number, chat in enumerate(chats):
            require_no_placeholders(chat.questions, self.processor, with_answers=True)
            if number == 0 or len(chat.questions) > 1:
                self._turns(chat)

    def tokens(self, chat: ImageChat, num_image_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids (seq,) of a chat, and its loss mask (seq,), which is 1 for answers including their end token."""
        tokenizer = self.processor.tokenizer
        ids: list[int] = []
        mask: list[int] = []
        for prompt, answer in self._turns(chat):
            prompt = prompt.replace(self.processor.image_token, self.processor.image_token * num_image_tokens)
            prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            answer_ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], self.end_token]
            ids += prompt_ids + answer_ids
            mask += [0] * len(prompt_ids) + [1] * len(answer_ids)
        return torch.tensor(ids), torch.tensor(mask)

    def _turns(self, chat: ImageChat) -> list[tuple[str, str]]:
        """For each answer, the text since the previous answer, and the answer.

        Raises:
            UserError: the template refuses the chat, does not terminate, omits a question, or renders earlier turns
                differently once later turns follow.
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
                    f"the chat template cannot render {question.sample_id} ({error}); fix the row, or the model's "
                    "template"
                ) from error
            if not text.startswith(written):
                raise UserError(
                    f"the chat template changes the answer to {chat.questions[number - 1].sample_id}, "
                    f"{chat.answers[number - 1]!r}, when another question follows; "
                    "set data.questions_per_chat=1"
                )
            added = text.removeprefix(written)
            if question.question.strip() not in added:
                raise UserError(
                    f"the chat template omits the question of {question.sample_id}; correct the model's template"
                )
            turns.append((added, answer))
            messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
            written = text + answer + self.processor.tokenizer.decode([self.end_token])
        return turns
