"""Base classes of datasets, and functions that read parquet files.

Does not import torch, because the launcher and the preparation commands read rows with this module.
"""

from __future__ import annotations

import os
import re
import shlex
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.commands import program
from verl_ext.data.config import RAW_SUFFIXES
from verl_ext.errors import UserError, first_line_of, remedy_for
from verl_ext.paths import caller_directory

if TYPE_CHECKING:
    import numpy as np
    from torch.utils.data import Dataset

    from verl_ext.data.config import DataConfig

    class MapDataset(Dataset[dict[str, Any]], ABC): ...
else:
    MapDataset = ABC  # PyTorch's data loader takes any object with `__getitem__` and `__len__`

MAX_BYTES = 256 << 20
"""Maximum number of bytes, of all files together, that a digest reads."""
BLOCK_BYTES = 1 << 20
ANSWER_KEYS = ("ground_truth", "answer")
"""Columns that the conversion to verl's RL format accepts instead of `reward_model.ground_truth`; the first counts."""
ORIGIN_KEY = "converted_from"
"""Column of converted data files with the source file and row, for messages."""
TOOLS_FAULT = (
    "it has tools, which neither GRPO nor evaluation renders",
    "describe them in the system turn, and remove the column 'tools'",
)
"""Reason and fix for a prompt with a column `tools`."""
PANDAS_INDEX = re.compile(r"__index_level_\d+__")
"""Name of the column to which pandas writes an unnamed index."""
OTHER_COLUMNS = (
    "set data.multiturn.messages_key to one of them, or, for a column of prompts and one of responses, "
    "data.multiturn.enable=false, data.prompt_key and data.response_key"
)
"""What to set if a file of chats lacks their column."""


class SampleDataset(MapDataset):
    """Samples as dictionaries; `row` is the sample's index in the dataset."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def first_token_from(self, minimum: int) -> tuple[int, int] | None:
        """Find the first token whose number is at least `minimum`.

        Returns:
            Index of its sample, and the token; None if there is none.
        """
        for index in range(len(self)):
            sample = self[index]
            for token in sample["prompt_ids"] if "prompt_ids" in sample else sample["input_ids"].tolist():
                if token >= minimum:
                    return index, token
        return None

    def describe(self, indices: Iterable[int]) -> str:
        """Names of samples for messages."""
        return ", ".join(self[index]["sample_id"] for index in indices)


class TokenDataset(SampleDataset):
    """Samples with `input_ids` and `loss_mask`, each (seq,).

    Attributes:
        lengths: number of tokens of each sample, (num_samples,).
    """

    lengths: np.ndarray

    @abstractmethod
    def final_tokens(self) -> Counter[int]:
        """Count the samples by their last token with loss."""

    def __getitems__(self, micro_batches: Sequence[Sequence[int]]) -> list[list[dict[str, Any]]]:
        """The samples of each micro-batch; PyTorch's data loader passes what `GlobalBatchSampler` yields."""
        return [[self[row] for row in rows] for rows in micro_batches]


def place_of(name: str, row: int, record: Mapping[str, Any]) -> str:
    """File and row for a message; for a converted file, also the source file and row."""
    origin = record.get(ORIGIN_KEY)
    return f"{name} row {row}" if not isinstance(origin, str) else f"{origin} ({name} row {row})"


@contextmanager
def reading_parquet(path: Path) -> Iterator[None]:
    """Turn errors into a `UserError` for the whole read, since a file with an intact footer may have damaged pages.

    Raises:
        UserError: the file cannot be read.
    """
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        fix = "prepare it again"
        if path.suffix.lower() != ".parquet":
            fix = "specify a file that ends in .parquet, .jsonl, .json, .csv or .tsv"
        fix = remedy_for(error, fix)
        raise UserError(f"{path} is not a readable parquet file ({first_line_of(error)}); {fix}") from error


def iter_parquet_rows(
    path: Path, columns: Sequence[str] | None = None, batch_size: int = 1000
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file as Python values, including nulls; see `drop_nulls`.

    Args:
        columns: columns to read; a dot selects a field of a struct. None reads all columns except pandas' index.
        batch_size: rows in memory at a time.

    Raises:
        UserError: the file cannot be read.
    """
    from pyarrow import parquet

    with reading_parquet(path), parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if columns is None and any(map(PANDAS_INDEX.fullmatch, names)):
            columns = [name for name in names if not PANDAS_INDEX.fullmatch(name)]
        for batch in file.iter_batches(batch_size, columns=columns):
            yield from batch.to_pylist()


def count_parquet_rows(path: Path) -> int:
    """Number of rows in a parquet file.

    Raises:
        UserError: the file cannot be read.
    """
    return int(_read_metadata(path).num_rows)


def _read_metadata(path: Path) -> Any:
    from pyarrow import parquet

    with reading_parquet(path):
        return parquet.read_metadata(path)


def drop_nulls(value: Any) -> Any:
    """Remove the null fields that parquet adds to structs, except `content`, and replace NaN with None."""
    if isinstance(value, list | tuple):
        return [drop_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None or key == "content"}
    return None if isinstance(value, float) and value != value else value


def drop_nulls_of_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """Apply `drop_nulls` to a row for GRPO, but keep `extra_info`'s own null fields, which functions for verl read."""
    kept: dict[str, Any] = drop_nulls(dict(row))
    if isinstance(extra := row.get("extra_info"), dict):
        kept["extra_info"] = {key: drop_nulls(value) for key, value in extra.items()}
    return kept


def check_parquet(path: Path, key: str, columns: Mapping[str, str]) -> int:
    """Check a parquet file that a configuration key names, and return its number of rows.

    Args:
        key: train_files or val_files.
        columns: required columns, by the key that names them.

    Raises:
        UserError: the file cannot be read, or lacks a column.
    """
    if re.match(r"[A-Za-z0-9]+:/", str(path)):  # Path collapses the two slashes of a URL
        raise UserError(f"data.{key} names the remote file {path}; copy it to a local or mounted path first")
    if path.is_dir():
        raise UserError(f"data.{key} names the directory {path.absolute()}; {files_advice(path, f'data.{key}=')}")
    if not path.is_file():
        fix = f"create it, or set data.{key} to your data (docs/start/your_data.md)"
        if any(mark in str(path) for mark in "*?["):
            places = dict.fromkeys((str(path), str(caller_directory() / path)))  # the scripts change to the repository
            fix = _listing_advice(f"data.{key}=", next(filter(None, (sorted(glob(place)) for place in places)), []))
        raise UserError(f"data.{key} names {path.absolute()}, which is not a file; {fix}")
    metadata = _read_metadata(path)
    require_columns(str(path), metadata.schema.to_arrow_schema().names, columns)
    return int(metadata.num_rows)


def files_advice(directory: Path, setting: str = "") -> str:
    """How to name the files of a directory instead.

    Args:
        setting: the key of a list of files, with `=`; empty if files are separate arguments.
    """
    if any((directory / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return (
            "datasets.save_to_disk wrote it; convert it with "
            "`datasets.load_from_disk(DIRECTORY).to_parquet(FILE)`, one file for each split, and specify that"
        )
    names = sorted(map(str, directory.iterdir()))
    of_suffix = ([name for name in names if name.lower().endswith(each)] for each in (".parquet", *RAW_SUFFIXES))
    return _listing_advice(setting, next(filter(None, of_suffix), []))


def _listing_advice(setting: str, found: Sequence[str]) -> str:
    """How to name several files; with the first of them, if there are any."""
    names = list(found[:2]) or ["a.parquet", "b.parquet"]
    listed = setting + (names[0] if len(names) == 1 else f"[{','.join(names)}]") if setting else None
    return f"list its files, such as {shlex.quote(listed) if listed else shlex.join(names)}"


def conversion_advice(command: str, options: str = "") -> str:
    """How to convert a file of another layout, for messages."""
    return f"convert the file with `{program('prepare')} {command} --input FILE {options}--output DIR`"


def require_columns(what: str, known: Collection[str], columns: Mapping[str, str]) -> None:
    """Refuse a file or row without a required column.

    Args:
        what: the file or row, for the message.
        known: its columns.
        columns: required columns, by the key that names them.

    Raises:
        UserError: a column is missing.
    """
    for setting, column in columns.items():
        if column not in known:
            fix = OTHER_COLUMNS if setting == "data.multiturn.messages_key" else f"set {setting} to one of them"
            raise UserError(f"{what} has no column '{column}' ({setting}); its columns are {', '.join(known)}; {fix}")


def unique_sample_ids(ids: Iterable[str]) -> Iterator[str]:
    """Append numbers to repeated ids, so that each sample has its own seeds.

    Numbers that would repeat another id are skipped: `a`, `a#2`, `a` become `a`, `a#2`, `a#3`.
    """
    given: set[str] = set()
    counts: Counter[str] = Counter()
    for sample_id in ids:
        counts[sample_id] += 1
        unique = sample_id if counts[sample_id] == 1 else f"{sample_id}#{counts[sample_id]}"
        while unique in given:
            counts[sample_id] += 1
            unique = f"{sample_id}#{counts[sample_id]}"
        given.add(unique)
        yield unique


def sampled_digest(paths: Sequence[Path]) -> str:
    """Digest of the contents of files in their order, independent of their names.

    Up to `MAX_BYTES`, the digest covers all bytes. For larger files, it covers the size and evenly spaced blocks,
    including the last block, where parquet stores the position, size and extremes of every column. Other changes go
    undetected.

    Raises:
        OSError: a file cannot be read.
    """
    import xxhash  # the launcher runs without it

    digest = xxhash.xxh3_128()
    for path in paths:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{size}\n".encode())
            for start in _block_starts(size, MAX_BYTES // len(paths)):
                file.seek(start)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def training_data_digest(data: DataConfig) -> str:
    """Digest of the training data of a configuration; empty if the data is not in local files."""
    paths = data.training_files()
    try:
        return sampled_digest(paths) if paths else ""
    except OSError:  # a custom dataset class may read its files from elsewhere
        return ""


def _block_starts(size: int, max_bytes: int) -> Sequence[int]:
    """Offsets of the blocks to read from a file."""
    if size <= max_bytes:
        return range(0, size, BLOCK_BYTES)
    last, num_blocks = max(size - BLOCK_BYTES, 0), max_bytes // BLOCK_BYTES
    return [last * number // (num_blocks - 1) for number in range(num_blocks)] if num_blocks > 1 else [last]
