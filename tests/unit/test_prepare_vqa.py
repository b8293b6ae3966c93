"""The VQA cards: what they show, what is asked, and the model that can be trained to read them."""

from __future__ import annotations

import argparse
import io
import itertools
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from verl_ext.controller.adapters import adapter_for
from verl_ext.data.image_chats import ImageChatDataset
from verl_ext.data.image_questions import question_of
from verl_ext.data.prepare import vqa
from verl_ext.data.prepare.vqa import (
    GLYPHS,
    LESSON_KINDS,
    QUESTIONS,
    SIDE,
    Card,
    build_processor,
    build_vlm,
    paint_card,
    question_rows,
    sample_card,
    sample_lessons,
    sample_questions,
)
from verl_ext.trainer.stages import load_config


def pixels(ink: float, digits: tuple[int, int], side: int = SIDE) -> np.ndarray:
    image = paint_card(Card("blue", digits, ink), random.Random(5))
    return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC), dtype=float)


def test_fine_print_is_readable_only_at_full_resolution() -> None:
    for side, bold_differs, fine_differs in ((SIDE, True, True), (SIDE // 3, True, False)):
        for ink, differs in ((1.0, bold_differs), (0.0, fine_differs)):
            distance = np.abs(pixels(ink, (0, 1), side) - pixels(ink, (4, 3), side)).max()
            assert (distance > 50) == differs and (distance < 4) == (not differs)


def test_every_digit_has_distinct_glyph() -> None:
    assert len({*GLYPHS}) == len(GLYPHS) == 5 and all(len(glyph) == 15 for glyph in GLYPHS)


def test_answers_match_card() -> None:
    card = Card("red", (3, 4), 0.0)
    assert {kind: card.answer(kind) for kind in QUESTIONS} == {"colour": "red", "digit": "3", "sum": "3+4=7;7-4=3"}
    rows = question_rows(8, card, ["sum", "colour"], random.Random(0))
    assert [row["question"] for row in rows] == ["Sum of the digits?", "Which colour?"]
    assert rows[0]["image"]["bytes"] == rows[1]["image"]["bytes"] and rows[0]["print"] == "fine"
    assert Image.open(io.BytesIO(rows[0]["image"]["bytes"])).size == (SIDE, SIDE)


def test_prints_and_question_kinds_have_expected_frequencies() -> None:
    rng = random.Random(1)
    inks = [sample_card(rng, faded_fraction=0.5).ink for _ in range(2000)]
    assert abs(inks.count(1.0) / 2000 - 0.5) < 0.05 and abs(inks.count(0.0) / 2000 - 0.25) < 0.05
    asked = Counter((row["kind"], row["print"]) for row in sample_questions(600, rng))
    assert asked.keys() == {("sum", "bold"), *itertools.product(("colour", "digit"), ("bold", "fine"))}
    assert 150 < asked.pop(("sum", "bold")) < 250 and all(60 < count < 140 for count in asked.values())
    rows = list(sample_lessons(40, rng, 0.5))
    assert len(rows) == 160 and {row["print"] for row in rows} == {"bold", "fine", "faded"}
    assert {row["kind"] for row in rows} == {*LESSON_KINDS}


@pytest.mark.parametrize("make", [sample_lessons, sample_questions])
def test_same_seed_gives_same_cards(make) -> None:  # type: ignore[no-untyped-def]
    assert list(make(5, random.Random(7))) == list(make(5, random.Random(7))) != list(make(5, random.Random(8)))


def test_model_accepts_cards_under_recipe_configurations() -> None:
    processor = build_processor()
    model = build_vlm(processor, seed=0)
    again = build_vlm(processor, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    section = load_config("sft", ["recipe=budget_vlm"]).configurations
    adapter = adapter_for(model.eval(), processor, tuple(section.tier_sizes))
    space = adapter.space(section.min_active, len(adapter.blocks), list(section.topk_choices))
    rows = question_rows(0, sample_card(random.Random(0)), ["colour", "sum"], random.Random(0))
    asked = [question_of("cards", number, row, "", None) for number, row in enumerate(rows)]
    assert len(ImageChatDataset(asked, 4)) == 1
    for tier, patches in enumerate((36, 144, 324)):
        inputs = adapter.inputs(asked[0].load_image(), asked[0].question, tier)
        assert adapter.num_patches(inputs) == patches
        with torch.no_grad(), adapter.configured(space.configuration(tier, [True, True, *[False] * 4], 1)):
            assert adapter.prefill(inputs).logits.shape == (1, len(processor.tokenizer))
    lengths = [len(processor.tokenizer.tokenize(answer)) for answer in ("red", "4", "orange", "3+4=7;7-4=3")]
    assert lengths == [1, 1, 1, 11]
    assert processor.tokenizer.eos_token == "<|im_end|>" and adapter.end_tokens == [processor.tokenizer.eos_token_id]


def test_command_writes_questions_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("NUM_LESSONS", 3), ("NUM_QUESTIONS", 5), ("NUM_VAL", 2)):
        monkeypatch.setattr(vqa, name, number)
    made = vqa.prepare_vqa(argparse.Namespace(output=str(tmp_path), seed=0))
    assert all((tmp_path / file).is_file() for file in made.files)
    per_lesson = vqa.QUESTIONS_PER_LESSON
    expected = {
        "lessons/train": 3 * per_lesson, "lessons/val": 2 * per_lesson, "questions/train": 5, "questions/val": 2,
    }  # fmt: skip
    assert {name: pq.read_table(tmp_path / f"{name}.parquet").num_rows for name in expected} == expected
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    assert made.counts == {**expected, "parameters": model.num_parameters()}
