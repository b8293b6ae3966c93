"""Cards: two digits on a coloured ground, in bold or in fine print, and what can be asked of them.

Bold print is ink, and can be read at any size. Fine print is a checkerboard of single pixels around the ground's
colour, which is plain to see in the whole picture and gone in one that is scaled down. A sum is answered with its
working and a check. So each question needs something else of a model: the colour can be told by little of it, fine
print needs the high tier, and the long answer of a sum makes every block dear.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

SIDE = 144
"""Pixels of a card: 9 patches of 8 pixels merged by twos, which a third and two thirds of it are multiples of too."""
COLOURS = {
    "red": (225, 60, 60),
    "green": (60, 180, 80),
    "blue": (80, 120, 235),
    "yellow": (235, 220, 70),
    "purple": (175, 90, 215),
    "orange": (245, 155, 50),
}
GLYPHS = ("111101101101111", "010110010010111", "111001111100111", "111001011001111", "101101111001001")
"""The digits from 0 on, each of 5 rows of 3 dots."""
DOT = 12
"""Pixels of a dot's side."""
CONTRAST = 85
"""Between the fine print's pixels and the ground."""
QUESTIONS = {"colour": "Which colour?", "digit": "First digit?", "sum": "Sum of the digits?"}

Row = dict[str, Any]


@dataclass(frozen=True)
class Card:
    """What is printed.

    Attributes:
        colour: of the ground.
        digits: from left to right.
        ink: 1 for bold print, 0 for fine print; between them both can be seen.
    """

    colour: str
    digits: tuple[int, int]
    ink: float

    def answer(self, kind: str) -> str:
        """The answer to a question of `QUESTIONS`."""
        first, last = self.digits
        return {"colour": self.colour, "digit": str(first), "sum": added(first, last)}[kind]


def added(first: int, last: int) -> str:
    """How a sum is answered: with its working and a check, so that it takes longer to say than a digit."""
    return f"{first}+{last}={first + last};{first + last}-{last}={first}"


def draw_card(rng: random.Random, bold_share: float = 0.5, faded_share: float = 0.0) -> Card:
    """A card.

    Args:
        rng: of the draw.
        bold_share: of cards in bold print, the others are in fine.
        faded_share: of the fine print that is mixed with ink, by which a model learns where to look.
    """
    colour, digits = rng.choice(list(COLOURS)), (rng.randrange(len(GLYPHS)), rng.randrange(len(GLYPHS)))
    if rng.random() < bold_share:
        return Card(colour, digits, 1.0)
    return Card(colour, digits, rng.uniform(0, 0.6) if rng.random() < faded_share else 0.0)


def paint(card: Card, rng: random.Random) -> Image.Image:
    """The picture of a card; light, ground, ink and place differ a little from one to the next."""
    pixels = np.full((SIDE, SIDE, 3), rng.randint(150, 240), dtype=np.float32)
    ground = 70 + 0.4 * np.array(COLOURS[card.colour]) + [rng.randint(-6, 6) for _ in range(3)]
    pixels[8:-8, 8:-8] = ground
    dark, right, down = rng.randint(0, 40), rng.randint(-1, 1), rng.randint(-1, 1)
    checkers = np.where(np.indices((SIDE, SIDE)).sum(0) % 2, CONTRAST, -CONTRAST)[..., None]
    for place, digit in enumerate(card.digits):
        dots = np.array(list(GLYPHS[digit]), dtype=int).reshape(5, 3).astype(bool)
        glyph = np.kron(dots, np.ones((DOT, DOT), dtype=bool))
        top, left = 42 + down, 24 + 60 * place + right
        window = slice(top, top + 5 * DOT), slice(left, left + 3 * DOT)
        part = pixels[window]
        part[glyph] = (card.ink * dark + (1 - card.ink) * (part + checkers[window]))[glyph]
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def rows_of_card(number: int, card: Card, kinds: list[str], rng: random.Random) -> list[Row]:
    """Questions about a card in the schema of TextVQA, with what it is beside it.

    Args:
        number: of the card, for the ids.
        card: that is painted.
        kinds: of the questions.
        rng: of the picture.
    """
    encoded = io.BytesIO()
    paint(card, rng).save(encoded, "png")
    return [
        {
            "image": {"bytes": encoded.getvalue(), "path": None},
            "question": QUESTIONS[kind],
            "answers": [card.answer(kind)],
            "question_id": f"{number}-{place}",
            "kind": kind,
            "print": "bold" if card.ink == 1 else "fine" if card.ink == 0 else "faded",
        }
        for place, kind in enumerate(kinds)
    ]
