"""Small image questions and chats, and files of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from verl_ext.data.image_questions import ImageQuestion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_ext.data.chats import ChatDataset

SIDE = 64
CHAT = [
    {"role": "user", "content": "Write f."},
    {"role": "assistant", "content": "def f(x):\n    return x"},
    {"role": "user", "content": "Write g."},
    {"role": "assistant", "content": "def g(x):\n    return 0"},
]
BUDGET_RECIPE = """
# a tiny model
stage: budget
data: {{train_batch_size: 2, datasets: {{tiny: {{source: {questions}}}}}}}
model: {{partial_pretrain: {model}}}
rollout: {{n: 3}}
controller:
  budgets_ms: [60.0, 200.0]
  tier_sizes: [256, 1024, 4096]
  min_active: 2
  max_active: 4
  topk_choices: [1, 2, 4]
  max_new_tokens: 3
latency: {{file: {latency}}}
trainer: {{project_name: p, experiment_name: tiny, total_epochs: 2, logger: [console, tensorboard], log_every: 1}}
"""


def row(number: int) -> dict[str, Any]:
    """A question in the schema of TextVQA."""
    image = {"bytes": noise(number, SIDE), "path": None}
    return {"image": image, "question": f"what is {number} ?", "answers": [str(number % 3)], "question_id": number}


def question(number: int) -> ImageQuestion:
    """A question about another image for each number."""
    return ImageQuestion(f"q{number}", noise(number, 96), "what is it ?", ("a cat",))


def noise(seed: int, side: int) -> bytes:
    """A square PNG of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "png")
    return encoded.getvalue()


def write_questions(folder: Path, train: int, val: int) -> Path:
    """Write `train.parquet` and `val.parquet` with these numbers of questions."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, numbers in {"train": range(train), "val": range(1000, 1000 + val)}.items():
        parquet.write_table(pa.Table.from_pylist([row(number) for number in numbers]), folder / f"{name}.parquet")
    return folder


def write_budget_inputs(directory: Path) -> Path:
    """Write `recipe.yaml` of the budget stage and its inputs: 8 training and 4 other questions, model, latencies."""
    from tests.helpers.vlms import write_model
    from verl_ext.controller.latency import FEATURES, LatencyModel
    from verl_ext.controller.vlm import fingerprint, load_adapter

    model, questions = write_model(directory / "model"), write_questions(directory / "questions", 8, 4)
    name = fingerprint(load_adapter(str(model), (256,)).model)
    # Each block and patch costs more, so that configurations differ in their worth.
    weights = {"blocks": 5.0, "experts": 1.0, "patches": 0.5}
    coefficients = {part: {key: weights.get(key, 0.0) for key in keys} for part, keys in FEATURES.items()}
    LatencyModel(coefficients, 1.0, "none", name).save(directory / "latency.json")
    text = BUDGET_RECIPE.format(questions=questions, model=model, latency=directory / "latency.json")
    (directory / "recipe.yaml").write_text(text)
    return directory


def dataset_of(
    rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, directory: Path, *overrides: str
) -> ChatDataset:
    """The SFT dataset of these rows, from a file in `directory`."""
    from tests.helpers.trainer import small_config
    from verl_ext.data.chats import ChatDataset

    path = directory / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    config = small_config(directory, directory, *overrides)
    return ChatDataset(str(path), tokenizer, config.data)
