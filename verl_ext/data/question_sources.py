"""Where questions about images come from: the hub by `datasets`, or parquet files of the same schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from verl_ext.data.dataset import iter_parquet_rows
from verl_ext.errors import UserError, first_line_of


@dataclass(frozen=True)
class KnownQuestions:
    """A public data set.

    Attributes:
        hub: its name there.
        splits: what the hub calls train and val.
        question: what is asked where the rows do not say.
        metric: one of `METRICS`.
    """

    hub: str
    splits: Mapping[str, str]
    question: str | None = None
    metric: str = "vqa"


METRICS = ("vqa", "cider")
"""How answers are compared with references: VQA soft accuracy, or CIDEr for captions."""


@dataclass(frozen=True)
class QuestionSource:
    """A data set as a recipe wants it.

    Attributes:
        train: rows to learn from; -1 for all, 0 for none.
        val: rows to measure on, likewise.
        source: a folder with `train*.parquet` and `val*.parquet`; None takes the hub.
        metric: one of `METRICS`; None takes the data set's own, vqa for one that is not known.
        images: the folder that images lie in which rows name by a path; None takes `source`.
    """

    train: int = -1
    val: int = -1
    source: str | None = None
    metric: str | None = None
    images: str | None = None

    @property
    def image_folder(self) -> Path | None:
        """Where images may be read from; None where rows must hold them."""
        folder = self.images or self.source
        return None if folder is None else Path(folder).expanduser()

    def metric_of(self, name: str) -> str:
        """The metric of the data set of this name."""
        return self.metric or (KNOWN[name].metric if name in KNOWN else METRICS[0])

    def size(self, split: str) -> int:
        """Rows of a split."""
        return self.train if split == "train" else self.val


_OWN = {"train": "train", "val": "validation"}
KNOWN = {
    "text_vqa": KnownQuestions("lmms-lab/textvqa", _OWN),
    "coco_2014_vqa": KnownQuestions("lmms-lab/VQAv2", dict.fromkeys(_OWN, "validation")),
    "okvqa": KnownQuestions("lmms-lab/OK-VQA", dict.fromkeys(_OWN, "val2014")),
    "coco_caption": KnownQuestions(
        "lmms-lab/COCO-Caption", dict.fromkeys(_OWN, "val"), "Describe the image in one sentence.", "cider"
    ),
}
SHARED = 5
"""Where the hub has answers for one split only, each row of this many is for val, the others for train."""


def require_rows(name: str, source: QuestionSource, split: str) -> None:
    """Refuse a data set that is neither known nor has files of a split.

    Raises:
        UserError: which it is, and how to mend it.
    """
    if source.source is not None:
        local_files(name, source.source, split)
    elif name not in KNOWN:
        raise UserError(
            f"data.datasets.{name} has no source and is none of {', '.join(KNOWN)}; give it a folder with "
            "train*.parquet and val*.parquet"
        )


def records_of(name: str, source: QuestionSource, split: str) -> Iterator[Mapping[str, Any]]:
    """Rows of a split, as many as are wanted, images as they are encoded.

    Raises:
        UserError: there is no such data set, or it cannot be read.
    """
    most = source.size(split)
    require_rows(name, source, split)
    rows: Iterator[Mapping[str, Any]]
    if source.source is None:
        rows = hub_rows(name, split)
    else:
        paths = local_files(name, source.source, split)
        rows = (row for path in paths for row in iter_parquet_rows(path, batch_size=64))  # images may be megabytes
    yield from islice(rows, most if most >= 0 else None)


def local_files(name: str, folder: str, split: str) -> list[Path]:
    """The parquet files of a split in a folder.

    Raises:
        UserError: there are none.
    """
    paths = sorted(Path(folder).expanduser().glob(f"{split}*.parquet"))
    if not paths:
        raise UserError(f"data.datasets.{name}.source={folder} has no {split}*.parquet; prepare it or correct the path")
    return paths


def hub_rows(name: str, split: str) -> Iterator[Mapping[str, Any]]:
    """Rows of one of `KNOWN`, streamed."""
    import datasets

    known = KNOWN[name]
    try:
        rows = datasets.load_dataset(known.hub, split=known.splits[split], streaming=True)
        is_shared = known.splits["train"] == known.splits["val"]
        for row, record in enumerate(rows.cast_column("image", datasets.Image(decode=False))):
            if not is_shared or (row % SHARED == 0) == (split == "val"):
                yield record
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"data.datasets.{name} cannot be had from the hub as {known.hub} ({first_line_of(error)}); set its "
            "source to a folder with train*.parquet and val*.parquet of the same schema"
        ) from error
