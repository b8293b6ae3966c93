"""Writes output so that a reader never sees half a file, and reads rows from JSON, CSV and parquet."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from verl_ext.errors import UserError, first_line_of

Row = dict[str, Any]
INPUTS = "*.parquet, *.csv, *.tsv, or JSON under any other name: a row per line, or one list of rows"
"""What `read_rows` takes, for --help."""
_SPACE = re.compile(r"\s*")
_digests: dict[tuple[str, int, int], str] = {}
"""By path, size and modification time."""


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


class FileState(NamedTuple):
    """The SHA-256 of a file's content in hexadecimal digits, and what the file was like when that was computed."""

    size: int
    mtime_ns: int
    digest: str


def file_state(path: Path) -> FileState:
    """Size, modification time and digest of a file; reads it only if `trust_state` and earlier calls knew another.

    Raises:
        UserError: it cannot be read.
    """
    with _reading(path):
        found = path.stat()
        key = str(path), found.st_size, found.st_mtime_ns
        if key not in _digests:
            _digests[key] = _digest_of(path)
    return FileState(found.st_size, found.st_mtime_ns, _digests[key])


def trust_state(path: Path, state: FileState) -> None:
    """Have `file_state` take a digest that was kept, as long as the file has that size and modification time."""
    _digests.setdefault((str(path), state.size, state.mtime_ns), state.digest)


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


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
        try:
            pyarrow.parquet.write_table(pyarrow.table(columns), temporary)
        except pyarrow.ArrowNotImplementedError as error:  # a column of nothing but empty objects
            raise UserError(f"parquet cannot hold a column ({first_line_of(error)}); remove it") from error


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Read the rows of a file with their numbers (from 1).

    A row that cannot be read gives a `ValueError` as its value, so that the caller decides what a bad row means.

    Args:
        path: `*.parquet`, `*.csv`, `*.tsv`, or JSON under any other name: one value per line, or one list of rows.

    Raises:
        UserError: the file is missing, is not what its name says, or is empty.
    """
    readers = {".parquet": read_parquet, ".csv": read_csv, ".tsv": read_csv}
    is_empty = True
    for item in readers.get(path.suffix.lower(), read_json)(path):
        is_empty = False
        yield item
    if is_empty:
        raise UserError(f"{path} holds no rows; check that it is the right file")


def read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """Read JSON Lines, the items of a file that is one JSON list, or the row of one that is a single object.

    See `read_rows`.
    """
    with _reading(path):
        with path.open(encoding="utf-8-sig") as file:
            start = file.read(4096).lstrip()[:1]
        text = path.read_text(encoding="utf-8-sig").strip() if start == "[" or path.suffix == ".json" else ""
    if start == "[":
        yield from enumerate(_items(path, text), start=1)
    elif text and isinstance(value := _decode(text), dict):
        yield 1, value
    else:
        yield from read_jsonl(path)


def _items(path: Path, text: str) -> Iterator[Any]:
    position, count = 1, 0
    while True:
        position = _SPACE.match(text, position).end()  # type: ignore[union-attr]  # it matches nothing, too
        if count == 0 and text[position : position + 1] == "]":
            return
        try:
            value, position = _decode_at(text, position)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{path} is not a JSON list from row {count + 1} on ({error}); correct it") from error
        yield value
        count += 1
        position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
        mark = text[position : position + 1]
        if mark == "]" and position == len(text) - 1:
            return
        if mark != ",":
            raise UserError(f"{path} is not a JSON list after row {count}; put a comma behind it, or end with ]")
        position += 1


def read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    """Read the values of a JSONL file with their line numbers (from 1); empty lines are skipped.

    A line that is not JSON gives a `ValueError` as its value, so that the caller decides what a bad line means.

    Raises:
        UserError: the file is missing or not text.
    """
    with _reading(path), path.open(encoding="utf-8-sig") as file:  # some editors begin with a byte-order mark
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _decode(line)


def read_csv(path: Path) -> Iterator[tuple[int, Any]]:
    """Read the rows of a CSV or TSV file whose first row names the columns; every value is text, empty ones are null.

    Rows are counted without the header, see `read_rows`.
    """
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    csv.field_size_limit(sys.maxsize)  # the default refuses fields of more than 128 KiB
    with _reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header = [name.strip() for name in next(reader, [])]
        _check_header(path, header)
        for number, fields in enumerate((fields for fields in reader if fields), start=1):
            if len(fields) != len(header):
                yield number, ValueError(f"it has {len(fields)} fields where the header has {len(header)}")
            else:
                yield number, {name: field or None for name, field in zip(header, fields)}


def _check_header(path: Path, header: list[str]) -> None:
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path} has two columns named {twice!r}; rename one")
    if len(header) == 1 and any(mark in header[0] for mark in ";\t|"):
        raise UserError(f"{path} has the single column {header[0]!r}; separate its columns by commas")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {path} ({first_line_of(error)}); check its path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path} as UTF-8 ({error.reason}); save it as UTF-8") from error
    except csv.Error as error:
        raise UserError(f"cannot read {path} as CSV ({error}); check its quotes and commas") from error


def _decode(text: str) -> Any:
    try:
        value, end = _decode_at(text, _SPACE.match(text).end())  # type: ignore[union-attr]
        if text[end:].strip():
            raise json.JSONDecodeError("Extra data", text, end)
        return value
    except (json.JSONDecodeError, RecursionError) as error:
        return ValueError(f"it is not JSON ({error})")


def _decode_at(text: str, start: int) -> tuple[Any, int]:
    """The value that begins at a position, and where it ends; a `ValueError` for one that would lose something."""
    twice: list[str] = []

    def to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            names = [name for name, _ in pairs]
            twice.append(next(name for name in names if names.count(name) > 1))
        return value

    value, end = json.JSONDecoder(object_pairs_hook=to_object).raw_decode(text, start)
    if twice:
        return ValueError(f"the key {twice[0]!r} occurs twice in an object"), end
    if "\\u" in text[start:end]:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return ValueError("it has half of a surrogate pair, which is JSON but no text"), end
    return value, end


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
