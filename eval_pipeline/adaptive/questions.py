"""The questions of an evaluation: from the data sets of the run's recipe, or from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_ext.data.config import QuestionSource
from verl_ext.data.image_questions import ImageQuestion, ImageQuestionDataset
from verl_ext.errors import UserError


def load_questions(
    config: Mapping[str, Any], folder: Path | None, suffix: str, sizes: Mapping[str, int]
) -> dict[str, list[ImageQuestion]]:
    """Questions of each split, as many of each data set as of the others.

    Args:
        config: of the run; empty without a run.
        folder: with `train*.parquet` and `val*.parquet`, in the place of the run's data sets; or None.
        suffix: put behind every question.
        sizes: how many are wanted of `train` and `val`.

    Raises:
        UserError: there is neither, or one cannot be read.
    """
    data = config.get("data", {})
    if folder is not None:
        sources = {"questions": QuestionSource(source=str(folder))}
    else:
        sources = {name: QuestionSource(**source) for name, source in (data.get("datasets") or {}).items()}
    if not sources:
        raise UserError("no questions are named; give --questions FOLDER with train*.parquet and val*.parquet")
    return {split: _load(sources, split, suffix, data, size) for split, size in sizes.items()}


def _load(
    sources: Mapping[str, QuestionSource], split: str, suffix: str, data: Mapping[str, Any], most: int
) -> list[ImageQuestion]:
    used = {name: source for name, source in sources.items() if source.size(split) != 0}
    share = -(-most // max(len(used), 1))
    limited = {name: _limited(source, split, share) for name, source in used.items()}
    dataset = ImageQuestionDataset(limited, split, suffix, data.get("max_unreadable_images", 0), progress=True)
    return dataset.samples[:most]


def _limited(source: QuestionSource, split: str, most: int) -> QuestionSource:
    size = source.size(split)
    return replace(source, **dict[str, Any]({split: most if size < 0 else min(size, most)}))
