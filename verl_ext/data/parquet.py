"""Reading a parquet file that a run was given, and telling it from another one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ext.errors import UserError, first_line_of

if TYPE_CHECKING:
    import pandas as pd

MOST_BYTES = 256 << 20
"""Of all files together that are read for their digest."""
BLOCK_BYTES = 1 << 20
ORIGIN_KEY = "converted_from"
"""Column of converted data files: file and row that a row was converted from, for messages."""


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


def check_parquet(path: Path, key: str, columns: Mapping[str, str]) -> int:
    """Number of rows of a parquet file that a key names.

    Args:
        path: of the file.
        key: train_files or val_files.
        columns: that it must have, by the key that names them.

    Raises:
        UserError: it cannot be read, or lacks a column.
    """
    from pyarrow import parquet

    if re.match(r"[A-Za-z0-9]+:/", str(path)):  # a path has one slash where the address had two
        raise UserError(f"data.{key} names the remote file {path}; copy it to a local or mounted path first")
    if not path.is_file():
        raise UserError(
            f"data.{key} names {path.absolute()}, which is not a file; correct the path or prepare the data"
        )
    with reading_parquet(path):
        metadata = parquet.read_metadata(path)
    known = metadata.schema.to_arrow_schema().names
    for setting, column in columns.items():
        if column not in known:
            raise UserError(f"{path} has no column '{column}' ({setting}); its columns are {', '.join(known)}")
    return int(metadata.num_rows)


def files_digest(paths: Sequence[Path]) -> str:
    """Digest of files in their order, wherever they are.

    Up to `MOST_BYTES` everything counts. Of larger files it is the size and evenly spaced blocks, among them the last,
    where parquet has the place, size and extremes of every column: a change that keeps all of these goes unnoticed.

    Raises:
        OSError: a file cannot be read.
    """
    import xxhash  # the launcher does without

    digest = xxhash.xxh3_128()
    for path in paths:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{size}\n".encode())
            for start in _block_starts(size, MOST_BYTES // len(paths)):
                file.seek(start)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def _block_starts(size: int, most_bytes: int) -> Sequence[int]:
    """Where the blocks begin that are read of a file."""
    if size <= most_bytes:
        return range(0, size, BLOCK_BYTES)
    last, num_blocks = max(size - BLOCK_BYTES, 0), most_bytes // BLOCK_BYTES
    return [last * number // (num_blocks - 1) for number in range(num_blocks)] if num_blocks > 1 else [last]


def read_frame(name: str) -> pd.DataFrame:
    """All rows of a file, `~` for the home directory.

    Raises:
        UserError: it cannot be read.
    """
    import pandas as pd  # the launcher reads first rows alone, and starts sooner without

    path = Path(name).expanduser()
    with reading_parquet(path):
        return pd.read_parquet(path)


def first_row(path: Path) -> dict[str, Any] | None:
    """The first row of a file by column, None where it has none.

    Raises:
        UserError: it cannot be read.
    """
    from pyarrow import parquet

    with reading_parquet(path), parquet.ParquetFile(path) as file:
        batch = next(file.iter_batches(1), None)
        return None if batch is None else plain(batch.to_pylist()[0])


def plain(value: Any) -> Any:
    """Arrow's nested arrays and mappings as Python lists and dicts without the null fields that parquet fills in."""
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if item is not None or key == "content"}
    return None if isinstance(value, float) and np.isnan(value) else value
