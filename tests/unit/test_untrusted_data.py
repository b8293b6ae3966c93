"""Data from others: images from one folder and in known formats, and text without terminal control codes."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from verl_ext.console import print_line
from verl_ext.data.config import QuestionSource
from verl_ext.data.image_questions import ImageQuestion, ImageQuestionDataset
from verl_ext.errors import UserError, exit_on_user_error


def encoded(kind: str) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (8, 6)).save(content, kind)
    return content.getvalue()


def read(folder: Path, image: object) -> ImageQuestionDataset:
    """The questions of a folder with one row that has this image."""
    folder.mkdir(exist_ok=True)
    rows = [{"image": image, "question": "?", "answers": "x"}]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return ImageQuestionDataset({"mine": QuestionSource(source=str(folder))}, "train")


def test_images_are_read_only_from_their_folder(tmp_path: Path) -> None:
    private = tmp_path / "private.png"
    private.write_bytes(encoded("png"))
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "link.png").symlink_to(private)
    (folder / "images" / "own.png").write_bytes(encoded("png"))
    for path in (str(private), "../private.png", "images/../../private.png", "images/link.png", "/dev/zero"):
        for column in (path, {"bytes": None, "path": path}):
            with pytest.raises(UserError, match=r"an image outside of .*set data.datasets.mine.images"):
                read(folder, column)
    assert read(folder, "images/own.png")[0]["sample"].load_image().size == (8, 6)


def test_rejects_image_that_is_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / "pipe.png")
    with pytest.raises(UserError, match="is not a file"):
        read(tmp_path / "data", "pipe.png")


def test_text_in_place_of_bytes_names_no_file(tmp_path: Path) -> None:
    private, pipe = tmp_path / "private.png", tmp_path / "pipe.png"
    private.write_bytes(encoded("png"))
    os.mkfifo(pipe)
    for text in (private, pipe):
        with pytest.raises(UserError, match="row 0 of mine has an image of the type str; store the encoded image"):
            read(tmp_path / "data", {"bytes": str(text), "path": None})
    with pytest.raises(UserError, match="is not a file"):
        ImageQuestion("q", str(pipe), "?", ("x",)).load_image()


def test_rejects_image_formats_read_by_other_programs(tmp_path: Path) -> None:
    postscript = encoded("eps")
    assert Image.open(io.BytesIO(postscript)).format == "EPS"  # which Pillow hands on to Ghostscript
    with pytest.raises(UserError, match="cannot identify image file"):
        read(tmp_path / "data", {"bytes": postscript, "path": None})
    for kind in ("png", "jpeg", "webp", "gif", "bmp", "tiff"):
        assert len(read(tmp_path / "data", {"bytes": encoded(kind), "path": None})) == 1


def test_terminal_control_codes_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b[2Jb\rc\x9b31m\td\ne"
    print_line(hostile)
    print_line(hostile, sys.stderr)
    with pytest.raises(SystemExit), exit_on_user_error():
        raise UserError(hostile)
    shown = capsys.readouterr()
    wanted = "a\\x1b[2Jb\\x0dc\\x9b31m\td\ne\n"
    assert (shown.out, shown.err) == (wanted, f"{wanted}error: {wanted}")
