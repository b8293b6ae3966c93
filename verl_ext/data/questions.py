"""Questions about images, of several data sets at once, as the budget controller is trained and measured on them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from verl_ext.console import progress_bar, warn
from verl_ext.data.dataset import SampleDataset, unique_sample_ids
from verl_ext.data.question_sources import KNOWN, QuestionSource, records_of
from verl_ext.errors import UserError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Of images. Pillow knows more, among them some that it hands on to other programs (EPS to Ghostscript)."""
NAMES_TOLD = 5
"""Of images that cannot be read, in one message."""


@dataclass(frozen=True)
class ImageQuestion:
    """One sample.

    Attributes:
        sample_id: names it, and no other of any split, in every run with this data.
        image: encoded, or the path of a file.
        question: as the model is asked.
        references: right answers, or captions.
        metric: by which answers are compared with them; see `question_sources.METRICS`.
    """

    sample_id: str
    image: bytes | Path
    question: str
    references: tuple[str, ...]
    metric: str = "vqa"

    def opened(self) -> Image.Image:
        """The image in RGB.

        Raises:
            UserError: it cannot be read.
        """
        try:
            source: Any = io.BytesIO(self.image) if isinstance(self.image, bytes) else self.image
            if isinstance(source, Path) and not source.is_file():
                raise OSError(f"{source} is no file")  # reading a pipe or a device might never end
            with Image.open(source, formats=FORMATS) as image:
                return image.convert("RGB")
        except (OSError, UnidentifiedImageError, ValueError, Image.DecompressionBombError) as error:
            raise UserError(f"the image of {self.sample_id} cannot be read: {error}") from error


class QuestionDataset(SampleDataset):
    """Rows as dictionaries: `row`, `sample_id` and `sample`, an `ImageQuestion`.

    Args:
        sources: data sets by name, one after the other.
        split: train or val.
        suffix: put behind every question.
        max_unreadable: images that may be left out because they cannot be read.
        progress: show a progress bar on a terminal.

    Raises:
        UserError: a row without question or answers; more unreadable images than allowed; no row at all.
    """

    def __init__(
        self,
        sources: Mapping[str, QuestionSource],
        split: str,
        suffix: str = "",
        max_unreadable: int = 0,
        progress: bool = False,
    ) -> None:
        wanted = {name: source for name, source in sources.items() if source.size(split) != 0}
        found = list(self._samples(wanted, split, suffix, progress))
        unreadable = [str(sample) for sample in found if isinstance(sample, UserError)]
        tell_of_unreadable(unreadable, max_unreadable)
        self.samples = [sample for sample in found if isinstance(sample, ImageQuestion)]
        if not self.samples:
            raise UserError(f"no question is left for {split}; give data.datasets.NAME.{split} a size above 0")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        return {"row": index, "sample_id": sample.sample_id, "sample": sample}

    def describe(self, indices: Iterable[int]) -> str:
        """How messages name samples."""
        return ", ".join(self.samples[index].sample_id for index in indices)

    def _samples(
        self, sources: Mapping[str, QuestionSource], split: str, suffix: str, progress: bool
    ) -> Iterator[ImageQuestion | UserError]:
        questions: list[ImageQuestion] = []
        for name, source in sources.items():
            records = records_of(name, source, split)
            bar = progress_bar(records, desc=f"reading {name}", unit="images", show=progress, leave=False)
            for row, record in enumerate(bar):
                question = question_of(name, row, record, suffix, source.image_folder)
                questions.append(replace(question, metric=source.metric_of(name)))
        ids = unique_sample_ids(question.sample_id for question in questions)
        bar = progress_bar(zip(questions, ids), desc="opening images", unit="images", show=progress, leave=False)
        for question, sample_id in bar:
            # results are stored by id, and the splits of many data sets use the same numbers
            question = replace(question, sample_id=f"{split}/{sample_id}")
            try:
                question.opened()
            except UserError as error:
                yield error
            else:
                yield question


def tell_of_unreadable(messages: Sequence[str], most: int) -> None:
    """Warn of images that are left out.

    Raises:
        UserError: there are more than allowed.
    """
    if not messages:
        return
    shown = "; ".join(messages[:NAMES_TOLD]) + ("; ..." if len(messages) > NAMES_TOLD else "")
    if len(messages) > most:
        raise UserError(
            f"{len(messages)} images cannot be read, more than data.max_unreadable_images={most}: {shown}; "
            "mend them, or raise it"
        )
    warn(f"{len(messages)} images cannot be read and are left out: {shown}")


def question_of(
    name: str, row: int, record: Mapping[str, Any], suffix: str, folder: Path | None = None
) -> ImageQuestion:
    """A row of a data set as a sample; `folder` is where its image may lie.

    Raises:
        UserError: it has no image, no question or no answer, or names an image elsewhere.
    """
    known = KNOWN.get(name)
    question = record.get("question") or (known.question if known else None) or ""
    references = tuple(text for text in answers_of(record) if text.strip())
    number = record.get("question_id", record.get("id", row))
    for part, there in {
        "question": isinstance(question, str) and question.strip(),
        "answer (its answers are empty)": references,
        "image": record.get("image") is not None,
    }.items():
        if not there:
            raise UserError(f"row {row} of {name} has no {part}; mend it or leave it out")
    try:
        image = image_of(record["image"], folder)
    except ValueError as error:
        raise UserError(
            f"row {row} of {name} names an image {error}; give data.datasets.{name}.images, the folder that all of "
            "them lie in"
        ) from error
    return ImageQuestion(f"{name}/{number}", image, question + suffix, references)


def answers_of(record: Mapping[str, Any]) -> list[str]:
    """The references of a row: a text, texts, or the dictionaries with `answer` that VQAv2 has."""
    given = record.get("answers", record.get("answer"))
    listed = [given] if isinstance(given, str | Mapping) else ([] if given is None else list(given))
    return [str(each["answer"] if isinstance(each, Mapping) else each) for each in listed]


def image_of(column: Any, folder: Path | None) -> bytes | Path:
    """What `datasets` and parquet files hold of an image: it itself, or its path in the folder.

    Raises:
        ValueError: the path leads elsewhere, by itself or by a link; the message says where.
    """
    if isinstance(column, Mapping) and column.get("bytes") is not None:
        return column["bytes"]
    if isinstance(column, bytes):
        return column
    named = str(column.get("path") if isinstance(column, Mapping) else column)
    if folder is None:
        raise ValueError(f"by its path {named}")
    root = folder.resolve()
    path = (root / named).resolve()
    if not path.is_relative_to(root):
        raise ValueError(f"that lies outside of {root}, {path}")
    return path
