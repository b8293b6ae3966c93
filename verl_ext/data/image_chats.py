"""Questions about images as chats to learn from: those about one image share a sequence, and its encoding."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_ext.data.dataset import SampleDataset
from verl_ext.data.questions import ImageQuestion


@dataclass(frozen=True)
class ImageChat:
    """An image and what is asked of it, one question after the other.

    Attributes:
        questions: all of one image.
    """

    questions: tuple[ImageQuestion, ...]

    @property
    def answers(self) -> list[str]:
        """What is learnt: of each question the answer that most references give, the first of those."""
        return [Counter(question.references).most_common(1)[0][0] for question in self.questions]


class ImageChatDataset(SampleDataset):
    """Rows as dictionaries: `row` and `chat`, an `ImageChat`.

    Args:
        samples: questions in any order.
        questions_per_chat: most questions of an image in one chat.

    Attributes:
        lengths: questions of each chat, (chats,).
    """

    def __init__(self, samples: Sequence[ImageQuestion], questions_per_chat: int = 1) -> None:
        by_image: dict[str, list[ImageQuestion]] = {}
        for sample in samples:
            by_image.setdefault(name_of(sample.image), []).append(sample)
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
        """How messages name samples."""
        return ", ".join(self.chats[index].questions[0].sample_id for index in indices)


def name_of(image: Any) -> str:
    """The same for two questions about one image."""
    return hashlib.blake2b(image, digest_size=16).hexdigest() if isinstance(image, bytes) else str(image)
