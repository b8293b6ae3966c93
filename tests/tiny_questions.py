"""Small files of questions about images, and a tiny vision-language model that has not learnt to answer them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from tests import tiny_vlms

SIDE = 64


def row(number: int) -> dict[str, Any]:
    """A question in the schema of TextVQA."""
    pixels = np.random.default_rng(number).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "png")
    image = {"bytes": encoded.getvalue(), "path": None}
    return {"image": image, "question": f"what is {number} ?", "answers": [str(number % 3)], "question_id": number}


def write_questions(folder: Path, train: int, val: int) -> Path:
    """`train.parquet` and `val.parquet` of so many questions."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, numbers in {"train": range(train), "val": range(1000, 1000 + val)}.items():
        parquet.write_table(pa.Table.from_pylist([row(number) for number in numbers]), folder / f"{name}.parquet")
    return folder


def write_model(folder: Path, seed: int = 0) -> Path:
    """A `qwen3_vl_moe` of four blocks with its processor."""
    model, processor = tiny_vlms.qwen3_vl_moe(seed)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
