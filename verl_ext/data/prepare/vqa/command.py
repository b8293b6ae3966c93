"""`vqa`: cards to read, for a tiny vision-language model to learn and for its budget controller."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from verl_ext.cli import IntArg
from verl_ext.console import progress_bar, staged_progress
from verl_ext.data.prepare.files import staging_directory, write_parquet
from verl_ext.data.prepare.stamp import Prepared
from verl_ext.data.prepare.vqa.cards import QUESTIONS, Row, draw_card, rows_of_card
from verl_ext.model_files import save_config, save_tokenizer

HELP = "Make cards with questions about them, and a 1.7M-parameter vision-language model to learn to answer them."
EXAMPLE = "vqa --output data/vqa"
NEXT = "sft 2 recipe=budget_vlm"
VERSION = 2
MODEL_NAME = "model"
LESSONS, QUESTIONS_NAME = "lessons", "questions"
"""Folders: what the model learns from, and what its controller learns from."""
LESSON = ["colour", "digit", "digit", "sum", "sum"]
"""Kinds that a lesson's questions are drawn from: colours are learnt soonest."""
QUESTIONS_PER_LESSON = 4
FADED_SHARE = 0.45
"""Of the fine print in lessons."""
NUM_LESSONS, NUM_QUESTIONS, NUM_VAL = 4000, 512, 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vqa`."""
    parser.add_argument("--seed", type=IntArg(0), default=0, help="seed of the cards and of the weights")


def run(arguments: argparse.Namespace) -> Prepared:
    """Write `lessons/`, `questions/`, each with `train.parquet` and `val.parquet`, and `model/`.

    Raises:
        UserError: the output directory cannot be written to.
    """
    output, rng = Path(arguments.output), random.Random(arguments.seed)
    made = {
        f"{LESSONS}/train.parquet": (lessons(NUM_LESSONS, rng, FADED_SHARE), NUM_LESSONS * QUESTIONS_PER_LESSON),
        f"{LESSONS}/val.parquet": (lessons(NUM_VAL, rng), NUM_VAL * QUESTIONS_PER_LESSON),
        f"{QUESTIONS_NAME}/train.parquet": (questions(NUM_QUESTIONS, rng), NUM_QUESTIONS),
        f"{QUESTIONS_NAME}/val.parquet": (questions(NUM_VAL, rng), NUM_VAL),
    }
    tables = {
        name: list(progress_bar(rows, total=total, desc=f"drawing {name}", unit="questions", leave=False))
        for name, (rows, total) in made.items()
    }
    for name, rows in tables.items():
        write_parquet(output / name, rows)
    with staged_progress({"making the model": 8}):
        files, num_parameters = _write_model(output / MODEL_NAME, arguments.seed)
    counts: dict[str, float] = {name.removesuffix(".parquet"): len(rows) for name, rows in tables.items()}
    return Prepared([*tables, *files], {**counts, "parameters": num_parameters})


def lessons(count: int, rng: random.Random, faded_share: float = 0.0) -> Iterator[Row]:
    """Several questions about each of some cards."""
    for number in range(count):
        kinds = rng.choices(LESSON, k=QUESTIONS_PER_LESSON)
        yield from rows_of_card(number, draw_card(rng, faded_share=faded_share), kinds, rng)


def questions(count: int, rng: random.Random) -> Iterator[Row]:
    """One question about each of some cards, every kind as often as the others; sums are of bold print."""
    for number in range(count):
        kind = rng.choice(list(QUESTIONS))
        yield from rows_of_card(number, draw_card(rng, bold_share=1.0 if kind == "sum" else 0.5), [kind], rng)


def _write_model(directory: Path, seed: int) -> tuple[list[str], float]:
    from verl_ext.data.prepare.vqa.model import build_model, build_processor

    processor = build_processor()
    model = build_model(processor, seed)
    with staging_directory(directory) as staging:
        model.save_pretrained(staging)
        save_config(model.config, staging)
        save_tokenizer(processor, staging)
        files = sorted(f"{MODEL_NAME}/{path.name}" for path in staging.iterdir())
    return files, model.num_parameters()
