"""Looks at the model and data files that a configuration names, before torchrun starts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from verl_ext.errors import UserError, first_line_of

ORIGIN_KEY = "converted_from"
"""Column of converted data files: file and row that a row was converted from, for messages."""


def check_model(config: DictConfig) -> None:
    """A model given as a path must hold a config.json; a hub name is left to transformers."""
    model = str(config.model.partial_pretrain)
    path = Path(model).expanduser()
    looks_like_hub_name = model.count("/") <= 1 and not model.startswith((".", "/", "~")) and not path.parent.is_dir()
    if looks_like_hub_name or "://" in model:
        return
    if not path.is_dir():
        raise UserError(
            f"there is no model at {path.absolute()} (model.partial_pretrain); give a directory or a hub name"
        )
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path.absolute()} holds no config.json, so it is no Hugging Face model; correct model.partial_pretrain"
        )
    try:
        json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not UTF-8
        raise UserError(
            f"{path.absolute() / 'config.json'} is not valid JSON ({first_line_of(error)}); restore the model"
        ) from error


def untrained_loss(model: str) -> float | None:
    """Loss of random guessing, for a model directory whose weights were never trained.

    Initialization sets the vectors of a transformer (norms and biases) to 0 or 1, and the first optimizer step moves
    them. So the weights are untrained if every vector in their files still is what initialization made it.

    Args:
        model: `model.partial_pretrain`.

    Returns:
        The logarithm of the vocabulary's size, in nats per token; None for trained weights, and where the weights are
        not in a local directory, not in safetensors files, or without vectors.
    """
    directory = Path(model).expanduser()
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return None
    from safetensors import SafetensorError, safe_open

    num_vectors = 0
    try:
        for path in files:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - this is no mapping
                    if len(tensors.get_slice(name).get_shape()) != 1:
                        continue
                    num_vectors += 1
                    values = set(tensors.get_tensor(name).unique().tolist())
                    if values not in ({0.0}, {1.0}):
                        return None
        config = json.loads((directory / "config.json").read_text())
        vocabulary = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (SafetensorError, OSError, ValueError):
        return None  # the ranks, which load the whole model, say what is wrong with it
    return math.log(vocabulary) if num_vectors and vocabulary else None


def file_list(files: str | ListConfig | list | None) -> list[str]:
    """`data.train_files` and the like as a list; null is the empty list."""
    if files is None:
        return []
    return list(files) if isinstance(files, Iterable) and not isinstance(files, str) else [str(files)]


def check_data(config: DictConfig) -> None:
    """Every data file must be readable parquet with the wanted column, and the training set must fill one batch."""
    rows = {}
    for key in ("train_files", "val_files"):
        files = file_list(config.data[key])
        rows[key] = sum(check_parquet(Path(name).expanduser(), key, config) for name in files)
        if files and rows[key] == 0:
            or_none = ", or val_files=null for none" if key == "val_files" else ""
            raise UserError(f"data.{key} holds no rows ({', '.join(files)}); give a data set{or_none}")
    if not rows["train_files"]:
        raise UserError("data.train_files is empty; give at least one parquet file")
    limit = config.data.train_max_samples
    rows_used = min(rows["train_files"], limit) if limit > 0 else rows["train_files"]
    if rows_used < config.data.train_batch_size:
        raise UserError(
            f"the training set has {rows_used} rows, fewer than one global batch of {config.data.train_batch_size}; "
            f"set data.train_batch_size to {rows_used} or less"
        )


@contextmanager
def reading_parquet(path: Path) -> Iterator[None]:
    """What reads a file runs inside: its end may be whole and its pages damaged.

    Raises:
        UserError: it cannot be read.
    """
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file ({first_line_of(error)}); prepare it again") from error


def check_parquet(path: Path, key: str, config: DictConfig) -> int:
    """Number of rows of a parquet file whose columns are those that the configuration names."""
    from pyarrow import parquet

    if re.match(r"[A-Za-z0-9]+:/", str(path)):  # a path has one slash where the address had two
        raise UserError(f"data.{key} names the remote file {path}; copy it to a local or mounted path first")
    if not path.is_file():
        raise UserError(
            f"data.{key} names {path.absolute()}, which is not a file; correct the path or prepare the data"
        )
    with reading_parquet(path):
        metadata = parquet.read_metadata(path)
    columns = metadata.schema.to_arrow_schema().names
    for setting, column in wanted_columns(config).items():
        if column not in columns:
            raise UserError(f"{path} has no column '{column}' ({setting}); its columns are {', '.join(columns)}")
    return metadata.num_rows


def wanted_columns(config: DictConfig) -> dict[str, str]:
    """Setting to column name of what a data file must have; a data set class of the user's own decides for itself."""
    if config.data.custom_cls.path is not None:
        return {}
    if config.stage == "grpo":
        return {"data.prompt_key": config.data.prompt_key}
    if config.data.multiturn.enable:
        return {"data.multiturn.messages_key": config.data.multiturn.messages_key}
    return {"data.prompt_key": config.data.prompt_key, "data.response_key": config.data.response_key}
