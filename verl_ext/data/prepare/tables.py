"""Reads training data from JSON, CSV and parquet, splits it into training and validation, and writes parquet."""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import random
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from verl_ext.cli import FloatArg, IntArg
from verl_ext.commands import program
from verl_ext.console import print_line, progress_bar
from verl_ext.data.dataset import ORIGIN_KEY, files_advice, iter_parquet_rows, unique_sample_ids
from verl_ext.data.prepare.command import staged_file
from verl_ext.errors import UserError, first_line_of

Row = dict[str, Any]
NumberedRows = Iterator[tuple[int, Any]]
"""Rows with their numbers, from 1. An unreadable row is replaced by a `ValueError` with the reason."""
INPUT_HELP = (
    "*.parquet, *.csv, *.tsv, or JSON with any other suffix: one row per line, or a list of rows; CSV and JSON may be "
    "compressed (*.gz)"
)
TRAIN_NAME = "train.parquet"
VAL_NAME = "val.parquet"
CSV_INDEX = re.compile(r"(Unnamed: [\d.]+)?")
"""Names of the first columns of a CSV file that hold pandas' index, of this or of an earlier file."""
_SPACE = re.compile(r"\s*")


# Rows that cannot be used


class RowError(Exception):
    """A row that cannot be used.

    Args:
        reason: what is wrong, without the file and number of the row.
        fix: how to fix the row; None for the default advice.
    """

    def __init__(self, reason: str, fix: str | None = None) -> None:
        super().__init__(reason)
        self.fix = fix


@dataclass(frozen=True)
class RowConverter:
    """Converts the rows of input files; a bad row is an error, or is counted and skipped.

    Attributes:
        command: name of the command, for messages.
        skip_bad: whether to skip bad rows.
        counts: receives the number of rows as `read`, and of bad rows as `bad`.
    """

    command: str
    skip_bad: bool
    counts: Counter[str]

    def convert(
        self, path: Path, name: str, rows: NumberedRows, to_row: Callable[[Row, int, Counter[str]], Row]
    ) -> Iterator[Row]:
        """Convert the rows of a file, and add the source of each row.

        Args:
            name: short name of the file; see `distinct_names`.
            to_row: converts a row, given its number and a counter for notes on changes; raises `RowError`.

        Raises:
            UserError: a row is bad and bad rows are not skipped.
        """
        notes: Counter[str] = Counter()
        for number, value in progress_bar(rows, desc=f"reading {path.name}", unit="rows"):
            self.counts["read"] += 1
            try:
                row = to_row(require_object(value), number, notes)
            except RowError as error:
                self.reject(error, f"{path} row {number}")
                continue
            yield {**row, ORIGIN_KEY: f"{name} row {number}"}
        for note, count in notes.items():
            print_line(f"{path}: {note} in {count} rows")

    def reject(self, error: RowError, place: str) -> None:
        """Count a bad row.

        Raises:
            UserError: bad rows are not skipped; the message names the file and the row.
        """
        if not self.skip_bad:
            command = f"{program('prepare')} {self.command}"
            fix = error.fix or f"correct it, or skip such rows with the option --skip-bad of `{command}`"
            raise UserError(f"{place}: {error}; {fix}") from error
        self.counts["bad"] += 1


def require_object(value: Any) -> Row:
    """Return a row unchanged if it is an object.

    Raises:
        RowError: the row could not be read, or is not an object.
    """
    if isinstance(value, ValueError):
        raise RowError(str(value))
    if not isinstance(value, dict):
        raise RowError(f"it has type {type(value).__name__}, not object")
    return value


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Name each path by its last part, or by as many parts as distinguish it; a repeated path gets a number."""
    names = {path: path.name for path in paths}
    for num_parts in range(2, max(len(path.parts) for path in paths) + 1):
        counts = Counter(names.values())
        for path, name in names.items():
            if counts[name] > 1:
                names[path] = Path(*path.parts[-num_parts:]).as_posix()
    return list(unique_sample_ids(names[path] for path in paths))


def refuse_overwritten_inputs(output: str, inputs: Iterable[str]) -> None:
    """Refuse inputs that `write_split` would overwrite.

    Raises:
        UserError: an input is `train.parquet` or `val.parquet` of the output directory.
    """
    written = {(Path(output) / name).resolve() for name in (TRAIN_NAME, VAL_NAME)}
    for name in inputs:
        if Path(name).resolve() in written:
            raise UserError(f"{name} is an input and would be overwritten; choose another --output")


# Reading


def read_rows(path: Path) -> NumberedRows:
    """Read the rows of a file: parquet, CSV and TSV by their suffix, anything else as JSON.

    Raises:
        UserError: the file is missing or empty, or its format does not match its suffix.
    """
    if path.is_dir():
        raise UserError(f"{path} is a directory; {files_advice(path)}")
    readers = {".parquet": read_parquet, ".csv": read_csv, ".tsv": read_csv}
    is_empty = True
    for item in readers.get(uncompressed(path).suffix.lower(), read_json)(path):
        is_empty = False
        yield item
    if is_empty:
        raise UserError(f"{path} contains no rows; check that it is the right file")


def read_parquet(path: Path) -> NumberedRows:
    """Read the rows of a parquet file.

    Raises:
        UserError: the file is missing or not parquet.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file; correct its path")
    yield from enumerate(iter_parquet_rows(path), start=1)


def read_csv(path: Path) -> NumberedRows:
    """Read a CSV or TSV file whose first row names the columns; the header is not numbered.

    Every value is text, or None for an empty field. The index that pandas writes to the first column is skipped.

    Raises:
        UserError: the file is missing, or is not CSV.
    """
    delimiter = "\t" if uncompressed(path).suffix.lower() == ".tsv" else ","
    csv.field_size_limit(sys.maxsize)  # the default refuses fields of more than 128 KiB
    with _read_errors(path), _open_text(path, newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header = [name.strip() for name in next(reader, [])]
        repeated = next((name for name in header if header.count(name) > 1), None)
        if repeated is not None:
            raise UserError(f"{path} has two columns named {repeated!r}; rename one")
        if len(header) == 1 and any(mark in header[0] for mark in ";\t|"):
            raise UserError(f"{path} has the single column {header[0]!r}; separate the columns with commas")
        index = set(takewhile(CSV_INDEX.fullmatch, header))
        for number, fields in enumerate((fields for fields in reader if fields), start=1):
            if len(fields) != len(header):
                yield number, ValueError(f"it has {len(fields)} fields where the header has {len(header)}")
            else:
                row = {name: field or None for name, field in zip(header, fields)}
                yield number, {name: field for name, field in row.items() if name not in index or not _is_number(field)}


def _is_number(field: str | None) -> bool:
    return field is not None and field.isdecimal()


def read_json(path: Path) -> NumberedRows:
    """Read JSON Lines, the items of a JSON list, or a single JSON object.

    Raises:
        UserError: the file is missing, is not text, or is a list with a syntax error.
    """
    with _read_errors(path):
        with _open_text(path) as file:
            start = file.read(4096)
            first = start.lstrip()[:1]
            is_whole = first == "[" or uncompressed(path).suffix == ".json"
            text = (start + file.read()).strip() if is_whole else ""
    if first == "[":
        yield from enumerate(_list_items(path, text), start=1)
    elif text and isinstance(value := _parse_json(text), dict):
        yield 1, value
    else:
        yield from read_jsonl(path)


def read_jsonl(path: Path) -> NumberedRows:
    """Read JSON Lines; rows are numbered by their lines, and empty lines are skipped.

    Raises:
        UserError: the file is missing or not text.
    """
    with _read_errors(path), _open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _parse_json(line)


def uncompressed(path: Path) -> Path:
    """The path without `.gz`."""
    return path.with_suffix("") if path.suffix.lower() == ".gz" else path


def _open_text(path: Path, newline: str | None = None) -> IO[str]:
    # some editors write a byte-order mark
    if uncompressed(path) != path:
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"cannot decompress {path} ({first_line_of(error)}); compress it again with gzip") from error
    except OSError as error:
        raise UserError(f"cannot read {path} ({first_line_of(error)}); check its path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path} as UTF-8 ({error.reason}); save it as UTF-8") from error
    except csv.Error as error:
        raise UserError(f"cannot read {path} as CSV ({error}); check its quotes and commas") from error


def _list_items(path: Path, text: str) -> Iterator[Any]:
    """Decode the items of a JSON list one by one, so that an error can name the row."""
    position, count = _skip_space(text, 1), 0
    if text[position : position + 1] == "]":
        return
    while True:
        try:
            value, position = _decode(text, position)
        except (ValueError, RecursionError) as error:  # also for a number of thousands of digits
            raise UserError(f"{path} is not a JSON list from row {count + 1} on ({error}); correct it") from error
        yield value
        count += 1
        position = _skip_space(text, position)
        mark = text[position : position + 1]
        if mark == "]" and position == len(text) - 1:
            return
        if mark != ",":
            raise UserError(f"{path} is not a JSON list after row {count}; add a comma, or end the list with ]")
        position = _skip_space(text, position + 1)


def _parse_json(text: str) -> Any:
    """Parse a JSON document; return a `ValueError` with the reason if it is malformed."""
    try:
        value, end = _decode(text, _skip_space(text, 0))
        if text[end:].strip():
            raise json.JSONDecodeError("Extra data", text, end)
        return value
    except (ValueError, RecursionError) as error:  # also for a number of thousands of digits
        return ValueError(f"it is not JSON ({error})")


def _decode(text: str, start: int) -> tuple[Any, int]:
    """Decode the JSON value at a position; return it, or a `ValueError` if it would lose content, and its end."""
    repeated: list[str] = []

    def to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            names = [name for name, _ in pairs]
            repeated.append(next(name for name in names if names.count(name) > 1))
        return value

    value, end = json.JSONDecoder(object_pairs_hook=to_object).raw_decode(text, start)
    if repeated:
        return ValueError(f"the key {repeated[0]!r} occurs twice in an object"), end
    if "\\u" in text[start:end]:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return ValueError("it has half of a surrogate pair, which JSON allows but text does not"), end
    return value, end


def _skip_space(text: str, position: int) -> int:
    return _SPACE.match(text, position).end()  # type: ignore[union-attr]  # it always matches


# Writing


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line, atomically."""
    with staged_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_parquet(path: Path, rows: list[Row]) -> None:
    """Write rows to a parquet file atomically, with the columns of all rows; missing values become null.

    Raises:
        UserError: a column mixes types, or the file cannot be written.
    """
    import pyarrow
    import pyarrow.parquet

    columns = {}
    for name in _column_names(rows):
        try:
            columns[name] = pyarrow.array([row.get(name) for row in rows])
        except (pyarrow.ArrowException, OverflowError) as error:
            raise UserError(
                f"column {name!r} mixes types or has integers beyond 64 bits ({error}); use one type in all rows, and "
                "text for such integers"
            ) from error
    with staged_file(path) as temporary:
        try:
            pyarrow.parquet.write_table(pyarrow.table(columns), temporary)
        except pyarrow.ArrowNotImplementedError as error:  # a column of empty objects only
            raise UserError(f"parquet cannot hold a column ({first_line_of(error)}); remove it") from error


def _column_names(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def encode_mixed_columns(rows: list[Row], *, keep: str) -> list[Row]:
    """Convert columns that parquet would refuse or change to text.

    Parquet gives all objects of a column the same members. In a `tools` column, each function would get the parameters
    of the other functions as nulls, and the model would see tools that do not exist.

    Args:
        rows: the samples, which are not modified.
        keep: a column to leave unchanged.

    Returns:
        The rows; in converted columns, nested values are JSON text, and numbers are text.
    """
    columns = {name: [row.get(name) for row in rows] for name in _column_names(rows) if name != keep}
    nested = {name for name, values in columns.items() if any(isinstance(value, (dict, list)) for value in values)}
    encoded = {name for name, values in columns.items() if not _survives_parquet(values, name in nested)}

    def encode(name: str, value: Any) -> Any:
        is_kept = name not in encoded or value is None or (isinstance(value, str) and name not in nested)
        return value if is_kept else json.dumps(value, default=str)

    return [{name: encode(name, value) for name, value in row.items()} for row in rows]


def _survives_parquet(values: list[Any], nested: bool) -> bool:
    import pyarrow

    if nested and any(map(_has_empty_object, values)):  # parquet has no struct without members
        return False
    try:
        array = pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError):
        return False
    return not nested or array.to_pylist() == values


def _has_empty_object(value: Any) -> bool:
    if isinstance(value, dict):
        return not value or any(map(_has_empty_object, value.values()))
    return isinstance(value, list) and any(map(_has_empty_object, value))


def rl_prompt_row(data_source: str, prompt: str, ability: str, ground_truth: str, extra_info: Row) -> Row:
    """Build a row in verl's RL format with a single user turn as the prompt."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


# Splitting


def add_split_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--val-fraction` and `--seed` to a command."""
    parser.add_argument(
        "--val-fraction",
        type=FloatArg(0, 1, closed=True),
        default=0.02,
        metavar="SHARE",
        help="share of the rows for validation; 0 writes only train.parquet, 1 only val.parquet",
    )
    parser.add_argument("--seed", type=IntArg(0), default=0, help="seed of the split")


def choose_val_groups(groups: Sequence[str], val_fraction: float, seed: int, grouped_by: str = "group") -> set[str]:
    """Choose groups at random until they hold `val_fraction` of the rows; each side gets at least one group.

    Args:
        val_fraction: share of the rows for validation, between 0 and 1.
        grouped_by: what the rows of a group have in common, for the message.

    Raises:
        UserError: there are fewer than two groups.
    """
    sizes = Counter(groups)
    if len(sizes) < 2:
        problem = f"all {len(groups)} rows have the same {grouped_by} and stay on one side of the split"
        if len(groups) == 1:
            problem = "there is only 1 distinct row"
        raise UserError(
            f"{problem}, but a split needs 2 sides; add other rows, or disable validation (data.val_files=null; "
            "--val-fraction 0)"
        )
    order = sorted(sizes)
    random.Random(seed).shuffle(order)
    chosen: set[str] = set()
    num_val = 0
    for group in order[:-1]:
        if chosen and num_val >= val_fraction * len(groups):
            break
        chosen.add(group)
        num_val += sizes[group]
    return chosen


def write_split(
    output: Path, rows: list[Row], groups: Sequence[str], val_fraction: float, seed: int, grouped_by: str
) -> dict[str, int]:
    """Write `train.parquet` and `val.parquet`; the rows of a group stay on one side, and rows stay in order.

    Prints a notice if the groups are so large that validation gets more than twice its share.

    Args:
        groups: the group of each row, with the length of `rows`.
        val_fraction: share of the rows for validation; 0 or 1 writes only one file.
        grouped_by: what the rows of a group have in common, for messages.

    Returns:
        The number of rows in each written file, by `train` and `val`.

    Raises:
        UserError: there are no rows, there are fewer groups than files, or a column mixes types.
    """
    if not rows:
        raise UserError("no row is left to write; add more data")
    if val_fraction in (0, 1):
        val_groups = set(groups) if val_fraction else set()
    else:
        val_groups = choose_val_groups(groups, val_fraction, seed, grouped_by)
    parts: dict[str, list[Row]] = {"train": [], "val": []}
    for row, group in zip(rows, groups, strict=True):
        parts["val" if group in val_groups else "train"].append(row)
    num_val = len(parts["val"])
    if num_val > max(1, 2 * val_fraction * len(rows)):
        print_line(
            f"{num_val} of {len(rows)} rows are held out for validation, more than the requested "
            f"{100 * val_fraction:g}%, because rows with the same {grouped_by} stay on one side of the split"
        )
    for name, part in parts.items():
        path = output / f"{name}.parquet"
        if part:
            write_parquet(path, part)
        else:
            path.unlink(missing_ok=True)  # left by an earlier preparation with another share
    return {name: len(part) for name, part in parts.items() if part}


def run_overrides(written: Collection[str], without_val: str = "data.val_files=null") -> list[str]:
    """The overrides that train on the written files, for `PrepareResult.next_overrides`.

    Args:
        written: the names of the files; `FILE` stands for a training file that is not among them.
        without_val: overrides for a run without a validation file; the recipe's file belongs to other training data.
    """
    train = f"{{output}}/{TRAIN_NAME}" if TRAIN_NAME in written else "FILE"
    val = f"data.val_files={{output}}/{VAL_NAME}" if VAL_NAME in written else without_val
    return [f"data.train_files={train}", *val.split()]
