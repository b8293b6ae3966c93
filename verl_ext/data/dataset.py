"""What a data set is, and the parquet files that data are read from.

Imports no torch, because the launcher and the preparation commands read rows with it.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.errors import UserError, first_line_of

if TYPE_CHECKING:
    import numpy as np
    from torch.utils.data import Dataset

    from verl_ext.data.config import DataConfig

    class MapDataset(Dataset[dict[str, Any]], ABC): ...
else:
    MapDataset = ABC  # PyTorch's data loader takes any object with `__getitem__` and `__len__`

MOST_BYTES = 256 << 20
"""Read of all files together for their digest."""
BLOCK_BYTES = 1 << 20
ORIGIN_KEY = "converted_from"
"""Column of converted data files: file and row that a row was converted from, for messages."""
PANDAS_INDEX = re.compile(r"__index_level_\d+__")
"""Name of the column in which pandas writes an index without a name."""


class SampleDataset(MapDataset):
    """Samples as dictionaries, each with its number in the data set as `row`."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def describe(self, indices: Iterable[int]) -> str:
        """How messages name samples."""
        return ", ".join(self[index]["sample_id"] for index in indices)


class TokenDataset(SampleDataset):
    """Samples with `input_ids` and `loss_mask`, each (seq,).

    Attributes:
        lengths: tokens of each sample, (num_samples,).
    """

    lengths: np.ndarray

    @abstractmethod
    def final_tokens(self) -> Counter[int]:
        """How many samples have each token as the last one with a loss."""

    def __getitems__(self, micro_batches: Sequence[Sequence[int]]) -> list[list[dict[str, Any]]]:
        """The samples of each micro-batch; PyTorch's data loader passes what `GlobalBatchSampler` yields."""
        return [[self[row] for row in rows] for rows in micro_batches]


def place_of(name: str, row: int, record: Mapping[str, Any]) -> str:
    """File and row for a message; of a converted file also those that the row was converted from."""
    origin = record.get(ORIGIN_KEY)
    return f"{name} row {row}" if not isinstance(origin, str) else f"{origin} ({name} row {row})"


@contextmanager
def reading_parquet(path: Path) -> Iterator[None]:
    """Report errors while a file is read: its footer may be intact and its pages damaged.

    Raises:
        UserError: it cannot be read.
    """
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        fix = "prepare it again"
        if path.suffix.lower() != ".parquet":
            fix = "give a file that ends in .parquet, .jsonl, .json, .csv or .tsv"
        raise UserError(f"{path} is not a readable parquet file ({first_line_of(error)}); {fix}") from error


def iter_parquet_rows(
    path: Path, columns: Sequence[str] | None = None, batch_size: int = 1000
) -> Iterator[dict[str, Any]]:
    """Rows of a parquet file as Python values, null where a row has none; see `drop_nulls`.

    Args:
        columns: read only these; a dot selects a field of a struct. None reads all but the index that pandas adds.
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
    """Number of rows of a parquet file.

    Raises:
        UserError: the file cannot be read.
    """
    return int(_read_metadata(path).num_rows)


def _read_metadata(path: Path) -> Any:
    from pyarrow import parquet

    with reading_parquet(path):
        return parquet.read_metadata(path)


def drop_nulls(value: Any) -> Any:
    """A value without the null fields that parquet adds to structs; `content` stays, and NaN counts as null."""
    if isinstance(value, list | tuple):
        return [drop_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None or key == "content"}
    return None if isinstance(value, float) and value != value else value


def check_parquet(path: Path, key: str, columns: Mapping[str, str]) -> int:
    """Number of rows of a parquet file that a key names.

    Args:
        key: train_files or val_files.
        columns: that it must have, by the key that names them.

    Raises:
        UserError: it cannot be read, or lacks a column.
    """
    if re.match(r"[A-Za-z0-9]+:/", str(path)):  # a path has one slash where the address had two
        raise UserError(f"data.{key} names the remote file {path}; copy it to a local or mounted path first")
    if not path.is_file():
        raise UserError(
            f"data.{key} names {path.absolute()}, which is not a file; create it, or set data.{key} to your data "
            "(docs/start/your_data.md)"
        )
    metadata = _read_metadata(path)
    known = metadata.schema.to_arrow_schema().names
    for setting, column in columns.items():
        if column not in known:
            raise UserError(f"{path} has no column '{column}' ({setting}); its columns are {', '.join(known)}")
    return int(metadata.num_rows)


def unique_sample_ids(ids: Iterable[str]) -> Iterator[str]:
    """Number equal ids from the second one on, so that each sample has its own seeds.

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


def files_digest(paths: Sequence[Path]) -> str:
    """Digest of the contents of files in their order, independent of their names.

    All bytes count up to `MOST_BYTES`. Of larger files, the size and evenly spaced blocks count, including the last
    block, where parquet stores the position, size and extremes of every column. A change that keeps all of these goes
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
            for start in _block_starts(size, MOST_BYTES // len(paths)):
                file.seek(start)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def training_data_digest(data: DataConfig) -> str:
    """Digest that identifies the training data of a configuration; empty if they are not in files on this machine."""
    paths = data.training_files()
    try:
        return files_digest(paths) if paths else ""
    except OSError:  # the user's data set class may read its files from elsewhere
        return ""


def _block_starts(size: int, most_bytes: int) -> Sequence[int]:
    """Offsets of the blocks of a file that are read."""
    if size <= most_bytes:
        return range(0, size, BLOCK_BYTES)
    last, num_blocks = max(size - BLOCK_BYTES, 0), most_bytes // BLOCK_BYTES
    return [last * number // (num_blocks - 1) for number in range(num_blocks)] if num_blocks > 1 else [last]
