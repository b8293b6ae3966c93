"""Questions about images, from parquet files or the Hugging Face hub.

Imports no torch, because the launcher checks that the data of a recipe exist.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from verl_ext.console import progress_bar, warn
from verl_ext.data.config import VQA_METRICS, ImageDataConfig, QuestionSource
from verl_ext.data.dataset import SampleDataset, iter_parquet_rows, unique_sample_ids
from verl_ext.errors import UserError, first_line_of

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Image formats that are read. Pillow passes some others to external programs (EPS to Ghostscript)."""
MAX_LISTED = 5
"""Unreadable images that a message names."""


@dataclass(frozen=True)
class PublicDataset:
    """A data set on the hub.

    Attributes:
        hub: its name there.
        splits: the hub's names of train and val.
        question: the question where the rows have none.
        metric: one of `VQA_METRICS`.
    """

    hub: str
    splits: Mapping[str, str]
    question: str | None = None
    metric: str = "vqa"


_USUAL_SPLITS = {"train": "train", "val": "validation"}
PUBLIC_DATASETS = {
    "text_vqa": PublicDataset("lmms-lab/textvqa", _USUAL_SPLITS),
    "coco_2014_vqa": PublicDataset("lmms-lab/VQAv2", dict.fromkeys(_USUAL_SPLITS, "validation")),
    "okvqa": PublicDataset("lmms-lab/OK-VQA", dict.fromkeys(_USUAL_SPLITS, "val2014")),
    "coco_caption": PublicDataset(
        "lmms-lab/COCO-Caption", dict.fromkeys(_USUAL_SPLITS, "val"), "Describe the image in one sentence.", "cider"
    ),
}
VAL_EVERY = 5
"""Where the hub has answers for one split only, every fifth row is for val and the others are for train."""


@dataclass(frozen=True)
class ImageQuestion:
    """One sample.

    Attributes:
        sample_id: unique over all splits, and the same in every run with this data.
        image: encoded, or the path of a file.
        question: as the model is asked.
        references: correct answers, or captions.
        metric: one of `VQA_METRICS`, by which answers are compared with the references.
    """

    sample_id: str
    image: bytes | Path
    question: str
    references: tuple[str, ...]
    metric: str = "vqa"

    def load_image(self) -> Image.Image:
        """Decode the image to RGB.

        Raises:
            UserError: it cannot be read.
        """
        try:
            source: Any = io.BytesIO(self.image) if isinstance(self.image, bytes) else self.image
            if isinstance(source, Path) and not source.is_file():
                raise OSError(f"{source} is not a file")  # reading a pipe or a device might never end
            with Image.open(source, formats=FORMATS) as image:
                return image.convert("RGB")
        except (OSError, UnidentifiedImageError, ValueError, Image.DecompressionBombError) as error:
            raise UserError(f"the image of {self.sample_id} cannot be read: {error}") from error


class ImageQuestionDataset(SampleDataset):
    """Samples with `row`, `sample_id` and `sample`, an `ImageQuestion`.

    Args:
        sources: data sets by name, read in this order.
        split: train or val.
        suffix: appended to every question.
        max_unreadable: unreadable images that are skipped; more are refused.
        progress: show a progress bar on a terminal.

    Raises:
        UserError: a row has no question or no answer, too many images are unreadable, or there are no rows.
    """

    def __init__(
        self,
        sources: Mapping[str, QuestionSource],
        split: str,
        suffix: str = "",
        max_unreadable: int = 0,
        progress: bool = False,
    ) -> None:
        questions = _read_questions(sources, split, suffix, progress)
        self.samples: list[ImageQuestion] = []
        unreadable: list[str] = []
        for question in progress_bar(questions, desc="opening", unit="images", show=progress, leave=False):
            try:
                question.load_image()
            except UserError as error:
                unreadable.append(str(error))
            else:
                self.samples.append(question)
        report_unreadable(unreadable, max_unreadable)
        if not self.samples:
            raise UserError(f"no question is left for {split}; give data.datasets.NAME.{split} a size above 0")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        return {"row": index, "sample_id": sample.sample_id, "sample": sample}


def load_image_questions(
    data: ImageDataConfig, progress: bool = False
) -> tuple[ImageQuestionDataset, ImageQuestionDataset | None]:
    """Training and validation set of a configuration; the second is None if every `val` size is 0.

    Raises:
        UserError: the data cannot be read, or have fewer questions than a batch.
    """
    sources = data.sources()
    settings = data.question_suffix, data.max_unreadable_images, progress
    train = ImageQuestionDataset(sources, "train", *settings)
    has_val = any(source.size("val") for source in sources.values())
    val = ImageQuestionDataset(sources, "val", *settings) if has_val else None
    if len(train) < data.train_batch_size:
        raise UserError(
            f"there are {len(train)} questions to train on, fewer than data.train_batch_size={data.train_batch_size}; "
            "lower it, or add questions"
        )
    return train, val


def _read_questions(
    sources: Mapping[str, QuestionSource], split: str, suffix: str, progress: bool
) -> list[ImageQuestion]:
    questions: list[ImageQuestion] = []
    for name, source in sources.items():
        records = iter_records(name, source, split) if source.size(split) else ()
        bar = progress_bar(records, desc=f"reading {name}", unit="rows", show=progress, leave=False)
        for row, record in enumerate(bar):
            question = question_of(name, row, record, suffix, source.image_folder)
            questions.append(replace(question, metric=metric_of(name, source)))
    ids = unique_sample_ids(question.sample_id for question in questions)
    # results are stored by id, and the splits of a data set often use the same numbers
    return [replace(question, sample_id=f"{split}/{unique}") for question, unique in zip(questions, ids)]


def report_unreadable(messages: Sequence[str], max_unreadable: int) -> None:
    """Warn of images that are skipped.

    Raises:
        UserError: there are more than allowed.
    """
    if not messages:
        return
    shown = "; ".join(messages[:MAX_LISTED]) + ("; ..." if len(messages) > MAX_LISTED else "")
    if len(messages) > max_unreadable:
        raise UserError(
            f"{len(messages)} images cannot be read, more than data.max_unreadable_images={max_unreadable}: {shown}; "
            "repair them, or raise it"
        )
    warn(f"{len(messages)} images cannot be read and are skipped: {shown}")


def question_of(
    name: str, row: int, record: Mapping[str, Any], suffix: str, folder: Path | None = None
) -> ImageQuestion:
    """Convert a row of a data set.

    Args:
        row: its number in the data set.
        suffix: appended to the question.
        folder: where the image of the row may be; None if the row must hold it.

    Raises:
        UserError: the row has no image, no question or no answer, or names an image outside the folder.
    """
    public = PUBLIC_DATASETS.get(name)
    question = record.get("question") or (public.question if public else None) or ""
    references = tuple(text for text in reference_answers(record) if text.strip())
    number = record.get("question_id", record.get("id", row))
    for part, is_there in {
        "question": isinstance(question, str) and question.strip(),
        "answer (its answers are empty)": references,
        "image": record.get("image") is not None,
    }.items():
        if not is_there:
            raise UserError(f"row {row} of {name} has no {part}; correct it or remove it")
    try:
        image = image_of(record["image"], folder)
    except ValueError as error:
        raise UserError(
            f"row {row} of {name} names an image {error}; set data.datasets.{name}.images to the folder that holds "
            "all of them"
        ) from error
    return ImageQuestion(f"{name}/{number}", image, question + suffix, references)


def reference_answers(record: Mapping[str, Any]) -> list[str]:
    """The references of a row: a text, texts, or the dictionaries with `answer` that VQAv2 has."""
    given = record.get("answers", record.get("answer"))
    listed = [given] if isinstance(given, str | Mapping) else ([] if given is None else list(given))
    return [str(each["answer"] if isinstance(each, Mapping) else each) for each in listed]


def image_of(column: Any, folder: Path | None) -> bytes | Path:
    """What `datasets` and parquet files hold of an image: its bytes, or its path in the folder.

    Raises:
        ValueError: the path leads out of the folder, directly or by a link; the message says where.
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
        raise ValueError(f"outside of {root}, {path}")
    return path


def metric_of(name: str, source: QuestionSource) -> str:
    """The metric of a data set: the recipe's, or the default of this data set."""
    default = PUBLIC_DATASETS[name].metric if name in PUBLIC_DATASETS else VQA_METRICS[0]
    return source.metric or default


def require_rows(name: str, source: QuestionSource, split: str) -> None:
    """Refuse a data set that is neither public nor has files of a split.

    Raises:
        UserError: there is none; the message says which.
    """
    if source.source is not None:
        source.files(name, split)
    elif name not in PUBLIC_DATASETS:
        raise UserError(
            f"data.datasets.{name} has no source and is none of {', '.join(PUBLIC_DATASETS)}; give it a folder with "
            "train*.parquet and val*.parquet"
        )


def iter_records(name: str, source: QuestionSource, split: str) -> Iterator[Mapping[str, Any]]:
    """Rows of a split, up to its size, with images as they are encoded.

    Raises:
        UserError: there is no such data set, or it cannot be read.
    """
    require_rows(name, source, split)
    if source.source is None:
        rows = _hub_rows(name, split)
    else:  # images may be megabytes
        rows = chain.from_iterable(iter_parquet_rows(path, batch_size=64) for path in source.files(name, split))
    size = source.size(split)
    return islice(rows, size if size >= 0 else None)


def _hub_rows(name: str, split: str) -> Iterator[Mapping[str, Any]]:
    """Rows of one of `PUBLIC_DATASETS`, streamed."""
    import datasets

    public = PUBLIC_DATASETS[name]
    try:
        rows = datasets.load_dataset(public.hub, split=public.splits[split], streaming=True)
        is_shared = public.splits["train"] == public.splits["val"]
        for row, record in enumerate(rows.cast_column("image", datasets.Image(decode=False))):
            if not is_shared or (row % VAL_EVERY == 0) == (split == "val"):
                yield record
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"data.datasets.{name} cannot be loaded from the hub as {public.hub} ({first_line_of(error)}); set its "
            "source to a folder with train*.parquet and val*.parquet of the same schema"
        ) from error
