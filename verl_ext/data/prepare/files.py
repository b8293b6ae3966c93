"""Writing output so that a reader never sees half a file, and reading rows from JSONL and parquet."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_ext.errors import UserError, first_line_of

Row = dict[str, Any]


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Give a temporary path to write to; it is flushed and renamed to `target` when the block ends without an error.

    Raises:
        UserError: the directory of `target` cannot be made.
    """
    with staging_directory(target.parent) as staging:
        yield staging / target.name


@contextmanager
def staging_directory(target: Path) -> Iterator[Path]:
    """Give an empty directory; the files written there are flushed and moved into `target` when the block ends.

    The directory lies inside `target`, because only within one file system is a rename atomic.

    Raises:
        UserError: `target` cannot be made or written to.
    """
    make_directory(target)
    with tempfile.TemporaryDirectory(dir=target, prefix=".preparing-") as name:
        yield Path(name)
        for path in sorted(Path(name).iterdir()):
            _flush(path)
            os.replace(path, target / path.name)


def make_directory(path: Path) -> None:
    """Make a directory to write into, with its parents, or take the one that is there.

    Raises:
        UserError: it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the directory {path} ({error.strerror}); choose another --output") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"no permission to write into {path}; choose another --output")


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line, atomically."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_parquet(path: Path, rows: list[Row]) -> None:
    """Write rows as parquet, atomically; the columns are those of all rows together, null where a row has none.

    Raises:
        UserError: a column holds values of different types.
    """
    import pyarrow
    import pyarrow.parquet

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names:
        try:
            columns[name] = pyarrow.array([row.get(name) for row in rows])
        except (pyarrow.ArrowException, OverflowError) as error:
            raise UserError(f"column {name!r} mixes types ({error}); give all its rows one type") from error
    with atomic_path(path) as temporary:
        pyarrow.parquet.write_table(pyarrow.table(columns), temporary)


def read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    """Read the values of a JSONL file with their line numbers (from 1); empty lines are passed over.

    A line that is not JSON gives its `json.JSONDecodeError` as value, so that the caller decides what a bad line means.

    Raises:
        UserError: the file is missing or not text.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:  # some editors begin with a byte-order mark
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _decode(line)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read {path} as UTF-8 JSONL ({first_line_of(error)}); check its path and format"
        ) from error


def _decode(line: str) -> Any:
    try:
        value = json.loads(line)
        if "\\u" in line:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text
        return value
    except json.JSONDecodeError as error:
        return error
    except (RecursionError, UnicodeEncodeError) as error:
        return json.JSONDecodeError(f"{type(error).__name__} ({error})", line[:40], 0)


def read_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    """Read the rows of a parquet file with their numbers (from 1).

    Raises:
        UserError: the file is missing or not parquet.
    """
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        raise UserError(f"{path} is not a file; correct its path")
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read {path} as parquet ({first_line_of(error)}); check its path and format") from error
    yield from enumerate(table.to_pylist(), start=1)
