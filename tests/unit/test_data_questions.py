"""Image questions in the schema of each public dataset, and error messages for invalid rows."""

from __future__ import annotations

import io
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from tests.helpers.data import noise
from verl_ext.data.config import QuestionSource
from verl_ext.data.image_questions import PUBLIC_DATASETS, ImageQuestion, ImageQuestionDataset, question_of
from verl_ext.errors import UserError


def png(color: str = "red") -> bytes:
    encoded = io.BytesIO()
    Image.new("L" if color == "grey" else "RGBA", (8, 6), color).save(encoded, "png")
    return encoded.getvalue()


ROWS: dict[str, list[dict[str, Any]]] = {
    "text_vqa": [
        {
            "image": {"bytes": png(), "path": None},
            "question": "what does it say?",
            "question_id": 34602 + number,
            "answers": ["stop"] * 9 + ["STOP"],
        }
        for number in range(3)
    ],
    "coco_2014_vqa": [
        {
            "image": {"bytes": png("grey"), "path": "x.jpg"},
            "question": "Is it red?",
            "question_id": 458752000,
            "multiple_choice_answer": "no",
            "answers": [{"answer": "no", "answer_confidence": "yes", "answer_id": n} for n in range(1, 11)],
        }
    ],
    "okvqa": [{"image": {"bytes": png(), "path": None}, "question": "Why?", "question_id": 1, "answers": ["so"] * 10}],
    "coco_caption": [
        {"image": {"bytes": png(), "path": None}, "id": 7, "answer": ["A red square.", "A square that is red."]}
    ],
}


def write(folder: Path, rows: list[dict[str, Any]], name: str = "train.parquet") -> str:
    folder.mkdir(exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), folder / name)
    return str(folder)


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, QuestionSource]:
    return {name: QuestionSource(source=write(tmp_path / name, rows)) for name, rows in ROWS.items()}


def test_public_schemas_are_read(sources: dict[str, QuestionSource]) -> None:
    assert set(sources) == set(PUBLIC_DATASETS)
    dataset = ImageQuestionDataset(sources, "train", suffix=" In one word.")
    samples = {item["sample_id"]: item["sample"] for item in (dataset[row] for row in range(len(dataset)))}
    assert list(samples) == [
        *(f"train/text_vqa/{34602 + number}" for number in range(3)),
        "train/coco_2014_vqa/458752000",
        "train/okvqa/1",
        "train/coco_caption/7",
    ]
    assert samples["train/text_vqa/34602"].references == ("stop",) * 9 + ("STOP",)
    assert samples["train/coco_2014_vqa/458752000"].references == ("no",) * 10
    assert samples["train/coco_2014_vqa/458752000"].question == "Is it red? In one word."
    assert samples["train/coco_caption/7"].question.startswith("Describe the image")
    opened = samples["train/coco_2014_vqa/458752000"].load_image()
    assert (opened.mode, opened.size) == ("RGB", (8, 6))
    assert dataset.describe([0, 5]) == "train/text_vqa/34602, train/coco_caption/7"


def test_dataset_sizes_limit_rows(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", ROWS["text_vqa"])
    write(tmp_path / "t", ROWS["text_vqa"][:2], "train-2.parquet")
    other = write(tmp_path / "o", ROWS["okvqa"])
    sizes = {(-1, -1): 6, (4, 0): 4, (2, 1): 3, (0, 1): 1}
    for (one, two), wanted in sizes.items():
        sources = {"text_vqa": QuestionSource(one, 0, folder), "okvqa": QuestionSource(two, 0, other)}
        assert len(ImageQuestionDataset(sources, "train")) == wanted
    with pytest.raises(UserError, match=r"no question is left for val; set data.datasets.NAME.val to a size"):
        ImageQuestionDataset(sources, "val")


def test_images_may_be_separate_files(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(png())
    folder = write(tmp_path / "mine", [{"image": str(path), "question": "?", "answers": "red"}])
    sample = ImageQuestionDataset({"mine": QuestionSource(source=folder, images=str(tmp_path))}, "train")[0]["sample"]
    assert sample.load_image().size == (8, 6) and sample.references == ("red",) and sample.sample_id == "train/mine/0"


def decoded(image: Image.Image, kind: str, **options: Any) -> Image.Image:
    """The image that a file of the given kind becomes."""
    image.save(file := io.BytesIO(), kind, **options)
    return ImageQuestion("one", file.getvalue(), "?", ("red",)).load_image()


def test_photo_is_turned_as_its_exif_data_say() -> None:
    image = Image.new("RGB", (64, 32))
    (exif := image.getexif())[0x0112] = 6  # turn clockwise
    image.paste("white", (0, 0, 8, 32))  # at the left of the file, and at the top of the picture
    found = decoded(image, "JPEG", exif=exif)
    assert found.size == (32, 64) and found.getpixel((16, 3)) == (255, 255, 255) and found.getpixel((2, 60))[0] < 9


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_brightness_of_16_bit_images_is_kept(kind: str) -> None:
    found = np.asarray(decoded(Image.fromarray(np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)), kind))
    assert found.shape == (32, 32, 3) and np.abs(found[..., 0].ravel() - np.arange(0, 65536, 64) / 257).max() <= 1


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_background_is_white(mode: str) -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.putpixel((3, 3), (0, 0, 0, 255))
    found = decoded(image.convert(mode), "PNG")
    assert sorted(found.getcolors() or []) == [(1, (0, 0, 0)), (63, (255, 255, 255))]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_brightness_without_known_range_is_rejected(mode: str) -> None:
    with pytest.raises(UserError, match=f"pixels of {mode} images have no known range"):
        decoded(Image.new(mode, (8, 8)), "TIFF")


def test_sample_ids_of_questions_are_unique(tmp_path: Path) -> None:
    numbers = [7, 7, 8]
    rows = [{**row, "question_id": number} for row, number in zip(ROWS["text_vqa"], numbers, strict=True)]
    write(tmp_path / "t", rows, "val.parquet")
    sources = {
        "one": QuestionSource(source=write(tmp_path / "t", rows)),
        "two": QuestionSource(source=str(tmp_path / "t")),
    }
    names = [each.sample_id for split in ("train", "val") for each in ImageQuestionDataset(sources, split).samples]
    assert names[:4] == ["train/one/7", "train/one/7#2", "train/one/8", "train/two/7"]
    assert len({*names}) == len(names) == 12


def test_unreadable_images_are_skipped_by_name_up_to_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [dict(row) for row in ROWS["text_vqa"]]
    rows[1]["image"] = {"bytes": b"no image", "path": None}
    rows.append({**rows[0], "image": {"bytes": png()[:40], "path": None}, "question_id": 9})
    sources = {"text_vqa": QuestionSource(source=write(tmp_path / "t", rows))}
    assert len(ImageQuestionDataset(sources, "train", max_unreadable=2)) == 2
    said = capsys.readouterr().err
    assert "2 images cannot be used and are skipped" in said and "text_vqa/34603" in said and "text_vqa/9" in said
    with pytest.raises(UserError, match=r"2 images .* more than data.max_unreadable_images=1: .*text_vqa/34603"):
        ImageQuestionDataset(sources, "train", max_unreadable=1)


def narrow_png() -> bytes:
    encoded = io.BytesIO()
    Image.new("L", (804, 4)).save(encoded, "png")
    return encoded.getvalue()


def png_with_broken_chunk() -> bytes:
    """Pillow raises a SyntaxError for it."""
    start, first, rest = noise(0, 300).split(b"IDAT", 2)
    return start + b"IDAT" + first + b"\0\0\0\0" + rest


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (png_with_broken_chunk(), "cannot be read: broken PNG file"),
        (narrow_png(), "is 804x4 pixels, an aspect ratio of 201, and processors accept at most 200"),
    ],
    ids=["broken", "narrow"],
)
def test_images_that_processors_reject_count_as_unreadable(
    image: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**ROWS["text_vqa"][0], "image": {"bytes": image, "path": None}}, ROWS["text_vqa"][1]]
    sources = {"text_vqa": QuestionSource(source=write(tmp_path / "t", rows))}
    assert len(ImageQuestionDataset(sources, "train", max_unreadable=1)) == 1
    assert f"the image of train/text_vqa/34602 {says}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": []}, r"row 1 of text_vqa has no answer \(its answers are empty\)"),
        ({"answers": ["", " "]}, "has no answer"),
        ({"answers": [None, None]}, "has no answer"),
        ({"question": " "}, "row 1 of text_vqa has no question"),
        ({"image": None}, "row 1 of text_vqa has no image"),
    ],
)
def test_invalid_question_rows_are_rejected(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    rows = [dict(row) for row in ROWS["text_vqa"]]
    rows[1] |= change
    with pytest.raises(UserError, match=message):
        ImageQuestionDataset({"text_vqa": QuestionSource(source=write(tmp_path / "t", rows))}, "train")


@pytest.mark.parametrize(
    ("answers", "references"),
    [
        (["no", None], ("no",)),
        ([{"answer": "no"}, {"answer": None}, None], ("no",)),
        ([7, None], ("7",)),
        (7, ("7",)),
        (0.5, ("0.5",)),
        ([0.5, float("nan")], ("0.5",)),
        ([Decimal("3.5"), Decimal("nan")], ("3.5",)),
        ({"answer": "no"}, ("no",)),
    ],
)
def test_answers_are_texts_or_numbers_and_null_is_none(answers: Any, references: tuple[str, ...]) -> None:
    record = {"image": png(), "question": "?", "answers": answers}
    assert question_of("mine", 0, record, "", None).references == references


@pytest.mark.parametrize("null", [None, float("nan")])
def test_null_column_is_as_a_missing_one(null: float | None) -> None:
    """Files of several datasets have the columns of all of them."""
    record = {"image": png(), "question": "?", "answers": null, "answer": "cat", "question_id": null, "id": 7}
    found = question_of("mine", 3, record, "", None)
    assert (found.references, found.sample_id) == (("cat",), "mine/7")
    assert question_of("mine", 3, {**record, "id": null}, "", None).sample_id == "mine/3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": True}, "row 3 of mine has a value of the type bool as an answer; answers must be texts"),
        ({"answers": [["no"]]}, "has a value of the type list as an answer"),
        ({"answers": {"text": "no"}}, "has a dictionary without the key 'answer' as an answer"),
        ({"answers": [float("inf")]}, "has the number inf as an answer"),
        ({"image": 3}, "row 3 of mine has an image of the type int; store the encoded image as bytes"),
    ],
)
def test_columns_of_wrong_type_are_rejected(change: dict[str, Any], message: str) -> None:
    record = {"image": png(), "question": "?", "answers": ["no"], **change}
    with pytest.raises(UserError, match=message):
        question_of("mine", 3, record, "", None)


@pytest.mark.parametrize("name", ["coco_2014_vqa", "okvqa", "coco_caption"])
def test_shared_split_of_hub_is_divided_by_image(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a local copy of the Hub's files, because tests have no network."""
    images = [png(f"#0000{shade:02x}") for shade in range(0, 240, 6)]
    row = {"question": "Is it blue?", "answers": ["yes"]}
    rows = [{"image": {"bytes": image, "path": None}, **row} for image in images for _ in range(3)]
    data_files, asked = write(tmp_path / "hub", rows) + "/train.parquet", []

    def load_local_copy(hub: str, split: str, streaming: bool) -> datasets.IterableDataset:
        asked.append((hub, split))
        return load_dataset("parquet", data_files=data_files, split="train", streaming=streaming)

    load_dataset = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", load_local_copy)
    parts = [ImageQuestionDataset({name: QuestionSource(train=-1, val=-1)}, part).samples for part in ("train", "val")]
    train, val = ({sample.image for sample in samples} for samples in parts)
    assert not train & val and train | val == {*images} and 2 <= len(val) <= 16
    assert sum(map(len, parts)) == len(rows), "all questions about an image are on one side"
    assert asked == [(PUBLIC_DATASETS[name].hub, PUBLIC_DATASETS[name].train)] * 2
    assert all("val" not in split for _, split in asked) or name == "coco_caption"  # benchmarks of lmms-eval


def test_invalid_question_sources_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"source=.* has no train\*.parquet"):
        ImageQuestionDataset({"okvqa": QuestionSource(source=str(tmp_path))}, "train")
    (tmp_path / "train.parquet").write_text("no parquet")
    with pytest.raises(UserError, match="train.parquet is not a readable parquet file"):
        ImageQuestionDataset({"okvqa": QuestionSource(source=str(tmp_path))}, "train")
    with pytest.raises(UserError, match="data.datasets.mine has no source and is none of text_vqa"):
        ImageQuestionDataset({"mine": QuestionSource()}, "train")
    with pytest.raises(UserError, match="cannot be loaded from the Hub as Multimodal-Fatima/OK-VQA_train .* source"):
        ImageQuestionDataset({"okvqa": QuestionSource()}, "train")  # tests have no network
