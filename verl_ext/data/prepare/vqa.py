"""`vqa`: creates questions about generated images, and a tiny vision-language model to answer them.

The images are cards: two digits on a colored ground, in bold or fine print. Bold print is solid ink and readable at
any size. Fine print is a checkerboard of single pixels around the ground's color, which is visible at full resolution
and disappears when the image is scaled down. The answer to a sum includes its working and a check. So each kind of
question needs a different part of a model: a small part recognizes the color, fine print needs the high tier, and the
long answer to a sum makes every block expensive.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.cli import IntArg
from verl_ext.console import progress_bar, staged_progress
from verl_ext.data.prepare.command import PrepareCommand, PrepareResult, write_model
from verl_ext.data.prepare.quickstart import PAD, TURN_END, TURN_START, train_tokenizer
from verl_ext.data.prepare.tables import Row, write_parquet

if TYPE_CHECKING:
    from PIL import Image
    from transformers import Qwen3VLMoeForConditionalGeneration, Qwen3VLProcessor

MODEL_NAME = "model"
LESSONS_NAME, QUESTIONS_NAME = "lessons", "questions"
"""Data directories for the model and for its controller."""
NUM_LESSONS, NUM_QUESTIONS, NUM_VAL = 4000, 512, 300
QUESTIONS_PER_LESSON = 4
LESSON_KINDS = ["colour", "digit", "digit", "sum", "sum"]
"""Distribution of the kinds of questions in lessons; colors are easiest to learn, so they are rarer."""
FADED_FRACTION = 0.45
"""Share of fine print in lessons that is mixed with ink."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vqa`."""
    parser.add_argument("--seed", type=IntArg(0), default=0, help="seed of the cards and of the weights")


def prepare_vqa(arguments: argparse.Namespace) -> PrepareResult:
    """Write `lessons/`, `questions/`, each with `train.parquet` and `val.parquet`, and `model/`.

    Raises:
        UserError: the output directory cannot be written to.
    """
    output, rng = Path(arguments.output), random.Random(arguments.seed)
    sampled = {
        f"{LESSONS_NAME}/train.parquet": (
            sample_lessons(NUM_LESSONS, rng, FADED_FRACTION), NUM_LESSONS * QUESTIONS_PER_LESSON
        ),
        f"{LESSONS_NAME}/val.parquet": (sample_lessons(NUM_VAL, rng), NUM_VAL * QUESTIONS_PER_LESSON),
        f"{QUESTIONS_NAME}/train.parquet": (sample_questions(NUM_QUESTIONS, rng), NUM_QUESTIONS),
        f"{QUESTIONS_NAME}/val.parquet": (sample_questions(NUM_VAL, rng), NUM_VAL),
    }  # fmt: skip
    tables = {
        name: list(progress_bar(rows, total=total, desc=f"painting {name}", unit="questions", leave=False))
        for name, (rows, total) in sampled.items()
    }
    for name, rows in tables.items():
        write_parquet(output / name, rows)
    with staged_progress({"creating the model": 8}):
        processor = build_processor()
        model = build_vlm(processor, arguments.seed)
        files = [f"{MODEL_NAME}/{name}" for name in write_model(output / MODEL_NAME, model, processor)]
    counts: dict[str, float] = {name.removesuffix(".parquet"): len(rows) for name, rows in tables.items()}
    return PrepareResult([*tables, *files], {**counts, "parameters": model.num_parameters()})


def sample_lessons(count: int, rng: random.Random, faded_fraction: float = 0.0) -> Iterator[Row]:
    """Yield several questions about each of `count` cards."""
    for number in range(count):
        kinds = rng.choices(LESSON_KINDS, k=QUESTIONS_PER_LESSON)
        yield from question_rows(number, sample_card(rng, faded_fraction=faded_fraction), kinds, rng)


def sample_questions(count: int, rng: random.Random) -> Iterator[Row]:
    """Yield one question about each of `count` cards; all kinds are equally likely, and sums are in bold print."""
    for number in range(count):
        kind = rng.choice(list(QUESTIONS))
        yield from question_rows(number, sample_card(rng, bold_fraction=1.0 if kind == "sum" else 0.5), [kind], rng)


# Cards

SIDE = 144
"""Pixels per side of a card: 9 pairs of merged 8-pixel patches, so that 1/3 and 2/3 of it are whole pairs too."""
COLORS = {
    "red": (225, 60, 60),
    "green": (60, 180, 80),
    "blue": (80, 120, 235),
    "yellow": (235, 220, 70),
    "purple": (175, 90, 215),
    "orange": (245, 155, 50),
}
GLYPHS = ("111101101101111", "010110010010111", "111001111100111", "111001011001111", "101101111001001")
"""The digits from 0, each as 5 rows of 3 dots."""
DOT = 12
"""Pixels per side of a dot."""
CONTRAST = 85
"""Difference in brightness between the fine print's pixels and the ground."""
# British spelling, because the digests of the data and recorded results depend on it
QUESTIONS = {"colour": "Which colour?", "digit": "First digit?", "sum": "Sum of the digits?"}


@dataclass(frozen=True)
class Card:
    """The content of a card.

    Attributes:
        color: color of the ground.
        digits: digits from left to right.
        ink: 1 for bold print, 0 for fine print; both are visible in between.
    """

    color: str
    digits: tuple[int, int]
    ink: float

    def answer(self, kind: str) -> str:
        """The answer to a question of `QUESTIONS`."""
        first, last = self.digits
        return {"colour": self.color, "digit": str(first), "sum": sum_answer(first, last)}[kind]


def sum_answer(first: int, last: int) -> str:
    """The answer to a sum, with its working and a check, so that it is longer than a digit."""
    return f"{first}+{last}={first + last};{first + last}-{last}={first}"


def sample_card(rng: random.Random, bold_fraction: float = 0.5, faded_fraction: float = 0.0) -> Card:
    """Sample a random card.

    Args:
        bold_fraction: share of cards in bold print; the others are in fine print.
        faded_fraction: share of fine print that is mixed with ink, which teaches a model where to look.
    """
    color, digits = rng.choice(list(COLORS)), (rng.randrange(len(GLYPHS)), rng.randrange(len(GLYPHS)))
    if rng.random() < bold_fraction:
        return Card(color, digits, 1.0)
    return Card(color, digits, rng.uniform(0, 0.6) if rng.random() < faded_fraction else 0.0)


def paint_card(card: Card, rng: random.Random) -> Image.Image:
    """Paint a card with slightly varying light, ground, ink and position."""
    import numpy as np
    from PIL import Image

    pixels = np.full((SIDE, SIDE, 3), rng.randint(150, 240), dtype=np.float32)
    ground = 70 + 0.4 * np.array(COLORS[card.color]) + [rng.randint(-6, 6) for _ in range(3)]
    pixels[8:-8, 8:-8] = ground
    dark, right, down = rng.randint(0, 40), rng.randint(-1, 1), rng.randint(-1, 1)
    checkers = np.where(np.indices((SIDE, SIDE)).sum(0) % 2, CONTRAST, -CONTRAST)[..., None]
    for position, digit in enumerate(card.digits):
        dots = np.array(list(GLYPHS[digit]), dtype=int).reshape(5, 3).astype(bool)
        glyph = np.kron(dots, np.ones((DOT, DOT), dtype=bool))
        top, left = 42 + down, 24 + 60 * position + right
        window = slice(top, top + 5 * DOT), slice(left, left + 3 * DOT)
        part = pixels[window]
        part[glyph] = (card.ink * dark + (1 - card.ink) * (part + checkers[window]))[glyph]
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def question_rows(number: int, card: Card, kinds: list[str], rng: random.Random) -> list[Row]:
    """Build questions about a card in TextVQA's schema, with their kinds and the card's print.

    Args:
        number: number of the card, for the ids.
        kinds: kinds of the questions.
    """
    encoded = io.BytesIO()
    paint_card(card, rng).save(encoded, "png")
    return [
        {
            "image": {"bytes": encoded.getvalue(), "path": None},
            "question": QUESTIONS[kind],
            "answers": [card.answer(kind)],
            "question_id": f"{number}-{position}",
            "kind": kind,
            "print": "bold" if card.ink == 1 else "fine" if card.ink == 0 else "faded",
        }
        for position, kind in enumerate(kinds)
    ]


# Model

HIDDEN_SIZE = 64
NUM_BLOCKS = 6
NUM_EXPERTS, EXPERTS_PER_TOKEN = 8, 4
PATCH = 8
VISION_WIDTH, VISION_MLP = 128, 1024
"""Wide enough that the patches of the high tier take a large share of the time, as in large models."""
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' }}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{- part.text }}"
    "{%- endif %}{%- endfor %}{{- '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>' }}{%- endif %}"
)
"""Omits role names: the roles alternate anyway, and their names would be a third of a chat's tokens."""


def build_processor() -> Qwen3VLProcessor:
    """Build a processor with a tokenizer for the cards' words and an image processor for their sizes."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    digits = range(len(GLYPHS))
    answers = [*COLORS, *map(str, digits), *itertools.starmap(sum_answer, itertools.product(digits, repeat=2))]
    turns = [{"role": "user", "content": text} for text in QUESTIONS.values()]
    turns += [{"role": "assistant", "content": text} for text in answers]
    tokenizer = train_tokenizer([turns, turns])  # twice, because words that occur once get no token
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN_START, TURN_END, *VISION_TOKENS]})
    tokenizer.chat_template = CHAT_TEMPLATE
    sizes = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": SIDE**2}
    images = Qwen2VLImageProcessor(patch_size=PATCH, temporal_patch_size=1, size=sizes)
    videos = Qwen3VLVideoProcessor(patch_size=PATCH, temporal_patch_size=1)
    return Qwen3VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)


def build_vlm(processor: Qwen3VLProcessor, seed: int) -> Qwen3VLMoeForConditionalGeneration:
    """Build a Qwen3-VL-MoE model with 1.7 million parameters and random weights.

    Args:
        processor: provides the vocabulary and the special tokens.
        seed: seed of the weights; the global random state does not change.
    """
    import torch
    from transformers import GenerationConfig, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    tokenizer = processor.tokenizer
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    config = Qwen3VLMoeConfig(
        text_config=_text_config(len(tokenizer)),
        vision_config=_vision_config(),
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLMoeForConditionalGeneration(config)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.convert_tokens_to_ids(PAD)}
    model.generation_config = GenerationConfig(**ends)
    return model


def _text_config(vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "moe_intermediate_size": HIDDEN_SIZE // 2,
        "num_hidden_layers": NUM_BLOCKS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "max_position_embeddings": 1024,
        "initializer_range": _weight_std(HIDDEN_SIZE),
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    }


def _vision_config() -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": VISION_WIDTH,
        "intermediate_size": VISION_MLP,
        "num_heads": 4,
        "out_hidden_size": HIDDEN_SIZE,
        "patch_size": PATCH,
        "temporal_patch_size": 1,
        "num_position_embeddings": (SIDE // PATCH) ** 2,
        "deepstack_visual_indexes": [0],
        "initializer_range": _weight_std(VISION_WIDTH),
    }


def _weight_std(width: int) -> float:
    """Standard deviation of a layer's initial weights: with the usual 0.02, a narrow model learns slowly at first."""
    return 0.8 / math.sqrt(width)


COMMAND = PrepareCommand(
    name="vqa",
    help="Create images of digit cards with questions about them, and a 1.7M-parameter vision-language model.",
    example="vqa --output data/vqa",
    next_command="sft 2 recipe=budget_vlm",
    version=2,
    add_arguments=add_arguments,
    run=prepare_vqa,
)
