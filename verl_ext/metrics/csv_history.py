"""`training_history.csv` and `validation_history.csv`: the rows of a run as tables for a spreadsheet or pandas."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from verl_ext.files import LineWriter, drop_torn_tail, replace_file
from verl_ext.metrics.row import KEY_COLUMNS, Row

TRAINING_FILE = "training_history.csv"
VALIDATION_FILE = "validation_history.csv"
MEASURED = ("val/", "eval/")
"""How the metrics of a measurement begin: SFT's, and those of the stages that learn from rewards."""


class CsvHistory:
    """Keeps both tables of a run directory, continuing those of earlier attempts."""

    name = "csv"

    def __init__(self, run_dir: Path) -> None:
        """Open the tables, creating those that are missing and mending a torn last line.

        Args:
            run_dir: where the tables are; must exist.

        Raises:
            OSError: a table cannot be opened.
        """
        self._training = CsvTable(Path(run_dir) / TRAINING_FILE)
        self._validation = CsvTable(Path(run_dir) / VALIDATION_FILE)

    def write(self, row: Row) -> None:
        """Add a row with `train/` metrics to the training table, one with `val/` or `eval/` to the validation table.

        A row with both is split; one with neither (the seconds of a save) stays in `metrics.jsonl` alone.

        Raises:
            OSError: the disk refuses the line.
        """
        trained = any(name.startswith("train/") for name in row.metrics)
        validated = any(name.startswith(MEASURED) for name in row.metrics)
        if trained:
            self._training.append(_fields(row, [name for name in row.metrics if not _is_of_validation(name)]))
        if validated:
            self._validation.append(_fields(row, [n for n in row.metrics if _is_of_validation(n) or not trained]))

    def close(self, exit_code: int = 0) -> None:
        """Close both tables."""
        self._training.close()
        self._validation.close()


class CsvTable:
    """A CSV file to which rows with new columns may be added."""

    def __init__(self, path: Path) -> None:
        """Open or create the file; its columns grow with the rows.

        Raises:
            OSError: the file cannot be opened.
        """
        self._path = path
        self._columns = _mend_and_read_header(path) if path.exists() else []
        self._writer = LineWriter(path)

    def append(self, fields: Mapping[str, object]) -> None:
        """Add one row.

        Args:
            fields: value by column; a column that is new gets empty fields in all earlier rows, a column that is
                missing here gets an empty field in this row.

        Raises:
            OSError: the disk refuses the line.
        """
        new_columns = [name for name in fields if name not in self._columns]
        if new_columns:
            self._add_columns(new_columns)
        self._writer.write(_encode([fields.get(name, "") for name in self._columns]))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._writer.close()

    def _add_columns(self, new_columns: Sequence[str]) -> None:
        columns = [*self._columns, *new_columns]
        padding = [""] * len(new_columns)
        self._writer.close()
        with open(self._path, encoding="utf-8", newline="") as old:
            rows = csv.reader(old)
            next(rows, None)  # the old header
            records: Iterator[list[str]] = chain([columns], (row + padding for row in rows))
            replace_file(self._path, (_encode(record) + "\n" for record in records))
        self._columns = columns
        self._writer = LineWriter(self._path)


def _is_of_validation(name: str) -> bool:
    return name.startswith(MEASURED) or any(f"/{prefix}" in name for prefix in MEASURED)


def _fields(row: Row, names: Sequence[str]) -> dict[str, object]:
    keys = dict(zip(KEY_COLUMNS, (row.step, row.attempt, row.time)))
    return {**keys, **{name: row.metrics[name] for name in names}}


def _mend_and_read_header(path: Path) -> list[str]:
    with open(path, "rb") as file:
        header = file.readline()
    columns = _decode(header) if header.endswith(b"\n") else []
    # Without its newline a line may have lost digits of its last number, so it cannot be kept.
    drop_torn_tail(path, lambda line: line.endswith(b"\n") and len(_decode(line)) == len(columns))
    return columns


def _encode(values: Sequence[object]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(values)
    return buffer.getvalue()


def _decode(line: bytes) -> list[str]:
    return next(csv.reader([line.decode(errors="replace")]), [])
