"""Questions about images, from parquet files or the Hugging Face Hub.

Does not import torch, because the launcher checks that the data of a recipe exists.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Any

import xxhash
from PIL import Image, ImageOps

from verl_ext.console import progress_bar, warn
from verl_ext.data.config import VQA_METRICS, ImageDataConfig, QuestionSource
from verl_ext.data.dataset import SampleDataset, iter_parquet_rows, unique_sample_ids
from verl_ext.errors import UserError, first_line_of

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Accepted image formats. Pillow passes some others to external programs (EPS to Ghostscript)."""
MAX_ASPECT_RATIO = 200
"""Maximum ratio of an image's longer side to its shorter side; the processors of the Qwen family refuse more."""
MAX_LISTED = 5
"""Maximum number of unusable images that a message names."""


@dataclass(frozen=True)
class PublicDataset:
    """A dataset on the Hub.

    Attributes:
        hub: name on the Hub.
        train: the Hub's split for training.
        val: the Hub's split for validation. If it is the same, a fifth of its images is held out.
        question: question for rows without one.
        metric: one of `VQA_METRICS`.
    """

    hub: str
    train: str = "train"
    val: str = "train"
    question: str | None = None
    metric: str = "vqa"


PUBLIC_DATASETS = {
    "text_vqa": PublicDataset("lmms-lab/textvqa", val="validation"),
    # The validation splits of these two are benchmarks of lmms-eval, so training and validation share the train split.
    "coco_2014_vqa": PublicDataset("Multimodal-Fatima/VQAv2_train"),
    "okvqa": PublicDataset("Multimodal-Fatima/OK-VQA_train"),
    "coco_caption": PublicDataset(
        "lmms-lab/COCO-Caption", "val", "val", question="Describe the image in one sentence.", metric="cider"
    ),
}
VAL_SHARE = 5
"""If train and val share a split, one image of five belongs to val."""


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image as a viewer shows it: turned as its EXIF data say, and on white where it is transparent.

    Raises:
        ValueError: the brightness of its pixels has no known range.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        return image.convert("I").point(lambda value: value * (255 / 65535)).convert("RGB")
    if image.mode in ("I", "F"):  # Pillow would cut off the values above 255
        raise ValueError(f"pixels of {image.mode} images have no known range; convert it to 8 or 16 bits per channel")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


@dataclass(frozen=True)
class ImageQuestion:
    """A sample.

    Attributes:
        sample_id: unique across all splits, and the same in every run with this data.
        image: encoded image, or the path of a file.
        question: the question as the model sees it.
        references: correct answers, or captions.
        metric: metric that compares answers with the references, one of `VQA_METRICS`.
    """

    sample_id: str
    image: bytes | Path
    question: str
    references: tuple[str, ...]
    metric: str = "vqa"

    def load_image(self) -> Image.Image:
        """Decode the image with `to_rgb`.

        Raises:
            UserError: the image cannot be read, or is too narrow.
        """
        try:
            source: Any = io.BytesIO(self.image) if isinstance(self.image, bytes) else Path(self.image)
            if isinstance(source, Path) and not source.is_file():
                raise OSError(f"{source} is not a file")  # reading a pipe or a device may block forever
            with Image.open(source, formats=FORMATS) as opened:
                image = to_rgb(opened)
        except Exception as error:  # decoders raise anything on damaged files, such as SyntaxError (PNG)
            raise UserError(f"the image of {self.sample_id} cannot be read: {error}") from error
        if problem := why_not_processable(image):
            raise UserError(f"the image of {self.sample_id} {problem}")
        return image


def why_not_processable(image: Image.Image) -> str | None:
    """Why processors refuse an image of this size, as the predicate of a sentence; None if they accept it."""
    width, height = image.size
    if min(width, height) < 1:
        return f"is {width}x{height} pixels, so it is empty"
    ratio = max(width, height) / min(width, height)
    if ratio > MAX_ASPECT_RATIO:
        return (
            f"is {width}x{height} pixels, an aspect ratio of {ratio:.0f}, and processors accept at most "
            f"{MAX_ASPECT_RATIO}"
        )
    return None


class ImageQuestionDataset(SampleDataset):
    """Samples with `row`, `sample_id` and `sample`, an `ImageQuestion`.

    Args:
        sources: datasets by name, read in this order.
        split: train or val.
        suffix: text appended to every question.
        max_unreadable: maximum number of unreadable images to skip.
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
            raise UserError(f"no question is left for {split}; set data.datasets.NAME.{split} to a size above 0")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        return {"row": index, "sample_id": sample.sample_id, "sample": sample}


def load_image_questions(
    data: ImageDataConfig, progress: bool = False
) -> tuple[ImageQuestionDataset, ImageQuestionDataset | None]:
    """Load training and validation set; the latter is None if every `val` size is 0.

    Raises:
        UserError: the data cannot be read, or has fewer questions than a batch.
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


def require_no_placeholders(samples: Iterable[ImageQuestion], processor: Any, with_answers: bool = False) -> None:
    """Refuse texts with the processor's token of an image or video, for which the prompt has no pixels.

    Args:
        with_answers: also check the references.

    Raises:
        UserError: a text contains such a token.
    """
    for sample in samples:
        texts = {"question": [sample.question], "answers": sample.references if with_answers else []}
        for part, each in texts.items():
            if token := placeholder_in(each, processor):
                raise UserError(
                    f"the {part} of {sample.sample_id} contain{'s' * (part == 'question')} {token}, which the model "
                    "reads as an image or video; remove it"
                )


def placeholder_in(texts: Iterable[str], processor: Any) -> str | None:
    """The processor's token of an image or video that one of the texts contains; None without such a token."""
    found = (getattr(processor, name, None) for name in ("image_token", "video_token"))  # not every processor has them
    tokens = [token for token in found if isinstance(token, str) and token]
    return next((token for text in texts for token in tokens if token in text), None)


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
    # results are stored by id, and the splits of a dataset often use the same numbers
    return [replace(question, sample_id=f"{split}/{unique}") for question, unique in zip(questions, ids)]


def report_unreadable(messages: Sequence[str], max_unreadable: int) -> None:
    """Warn about skipped images.

    Raises:
        UserError: more images are unreadable than allowed.
    """
    if not messages:
        return
    shown = "; ".join(messages[:MAX_LISTED]) + ("; ..." if len(messages) > MAX_LISTED else "")
    if len(messages) > max_unreadable:
        raise UserError(
            f"{len(messages)} images cannot be used, more than data.max_unreadable_images={max_unreadable}: {shown}; "
            "correct or remove them, or raise it"
        )
    warn(f"{len(messages)} images cannot be used and are skipped: {shown}")


def question_of(name: str, row: int, record: Mapping[str, Any], suffix: str, folder: Path | None) -> ImageQuestion:
    """Convert a row of a dataset.

    Args:
        row: index of the row in the dataset.
        suffix: text appended to the question.
        folder: folder that may contain the row's image; None if the row itself must contain it.

    Raises:
        UserError: the row has no image, no question or no answer, names an image outside the folder, or has a value of
            another type.
    """
    public = PUBLIC_DATASETS.get(name)
    question = record.get("question") or (public.question if public else None) or ""
    try:
        references = tuple(text for text in reference_answers(record) if text.strip())
    except TypeError as error:
        raise UserError(
            f"row {row} of {name} has {error} as an answer; answers must be texts, finite numbers, or dictionaries "
            "with such an 'answer'"
        ) from error
    number = _first_value(record, "question_id", "id")
    for part, is_there in {
        "question": isinstance(question, str) and question.strip(),
        "answer (its answers are empty)": references,
        "image": record.get("image") is not None,
    }.items():
        if not is_there:
            raise UserError(f"row {row} of {name} has no {part}; correct it or remove it")
    try:
        image = image_of(record["image"], folder)
    except TypeError as error:
        raise UserError(
            f"row {row} of {name} has an image of {error}; store the encoded image as bytes, or the name of its file"
        ) from error
    except ValueError as error:
        raise UserError(
            f"row {row} of {name} names an image {error}; set data.datasets.{name}.images to the folder of all images"
        ) from error
    return ImageQuestion(f"{name}/{row if number is None else number}", image, question + suffix, references)


def reference_answers(record: Mapping[str, Any]) -> list[str]:
    """The references of a row: a text, a list of texts, or as in VQAv2 a list of dictionaries with `answer`.

    A number counts as its text, and null as no answer; pandas writes null as NaN.

    Raises:
        TypeError: an answer is neither a text nor a number; the message describes it.
    """
    given = _first_value(record, "answers", "answer")
    found = []
    for each in given if isinstance(given, list | tuple) else [given]:
        if isinstance(each, Mapping) and "answer" not in each:
            raise TypeError("a dictionary without the key 'answer'")
        answer = each["answer"] if isinstance(each, Mapping) else each
        if _is_null(answer):
            continue
        if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal):
            raise TypeError(f"a value of the type {type(answer).__name__}")
        if isinstance(answer, float | Decimal) and math.isinf(answer):
            raise TypeError(f"the number {answer}")
        found.append(str(answer))
    return found


def _first_value(record: Mapping[str, Any], *columns: str) -> Any:
    """The value of the first column that is not null; None if all are."""
    return next((record[name] for name in columns if not _is_null(record.get(name))), None)


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float | Decimal) and math.isnan(value))


def image_of(column: Any, folder: Path | None) -> bytes | Path:
    """The bytes of an image in a column of `datasets` or parquet files, or its path in the folder.

    Raises:
        TypeError: the column holds neither bytes nor a path; the message names the type.
        ValueError: the path leads out of the folder, directly or through a link; the message names the target.
    """
    content, named = (column.get("bytes"), column.get("path")) if isinstance(column, Mapping) else (None, column)
    value = named if content is None else content
    if isinstance(value, bytes):
        return value
    if content is not None or not isinstance(named, str):  # text in `bytes` must not name a file
        raise TypeError(f"the type {type(value).__name__}")
    if folder is None:
        raise ValueError(f"by its path {named}")
    root = folder.resolve()
    path = (root / named).resolve()
    if not path.is_relative_to(root):
        raise ValueError(f"outside of {root}, {path}")
    return path


def image_size(processor: Any, max_size: int) -> dict[str, int]:
    """Return `size` of an image processor of the Qwen family at a tier, whose images keep their aspect ratio.

    Args:
        max_size: the tier's entry in `tier_sizes`.
    """
    return {"shortest_edge": min(processor.image_processor.size["shortest_edge"], max_size), "longest_edge": max_size}


def metric_of(name: str, source: QuestionSource) -> str:
    """The metric of a dataset: from the recipe, or the dataset's default."""
    default = PUBLIC_DATASETS[name].metric if name in PUBLIC_DATASETS else VQA_METRICS[0]
    return source.metric or default


def require_rows(name: str, source: QuestionSource, split: str) -> None:
    """Refuse a dataset that is not public and has no files of a split.

    Raises:
        UserError: the dataset is unknown, or has no files of the split.
    """
    if source.source is not None:
        source.files(name, split)
    elif name not in PUBLIC_DATASETS:
        raise UserError(
            f"data.datasets.{name} has no source and is none of {', '.join(PUBLIC_DATASETS)}; set its source to a "
            "folder with train*.parquet and val*.parquet"
        )


def iter_records(name: str, source: QuestionSource, split: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a split up to its configured size, with encoded images.

    Raises:
        UserError: the dataset does not exist or cannot be read.
    """
    require_rows(name, source, split)
    if source.source is None:
        rows = _hub_rows(name, split)
    else:  # images may be megabytes
        rows = chain.from_iterable(iter_parquet_rows(path, batch_size=64) for path in source.files(name, split))
    size = source.size(split)
    return islice(rows, size if size >= 0 else None)


def _is_held_out(image: Any) -> bool:
    """Whether an image of a shared split belongs to val; all questions about an image are on the same side."""
    encoded = image_of(image, folder=None)
    assert isinstance(encoded, bytes), "a streamed image comes with its bytes"
    return xxhash.xxh64_intdigest(encoded) % VAL_SHARE == 0


def _hub_rows(name: str, split: str) -> Iterator[Mapping[str, Any]]:
    """Stream the rows of one of `PUBLIC_DATASETS`."""
    import datasets

    public = PUBLIC_DATASETS[name]
    try:
        rows = datasets.load_dataset(public.hub, split=public.val if split == "val" else public.train, streaming=True)
        for record in rows.cast_column("image", datasets.Image(decode=False)):
            if public.train != public.val or _is_held_out(record["image"]) == (split == "val"):
                yield record
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"data.datasets.{name} cannot be loaded from the Hub as {public.hub} ({first_line_of(error)}); set its "
            "source to a folder with train*.parquet and val*.parquet of the same schema"
        ) from error
