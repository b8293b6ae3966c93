"""`training_history.csv` and `validation_history.csv`: a run as tables for a spreadsheet or pandas."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from verl_ext.files import LineWriter, replace_file
from verl_ext.metrics.jsonl import KEY_COLUMNS, MetricsRow, is_training_row
from verl_ext.metrics.sinks import MetricsSink

TRAINING_FILE = "training_history.csv"
VALIDATION_FILE = "validation_history.csv"
EPOCH_FILES = {"Train": TRAINING_FILE, "Val": VALIDATION_FILE}
QUANTITIES = ("reward", "accuracy", "latency")
EPOCH_COLUMNS = (
    "epoch",
    "loss",
    *(f"{name}_{statistic}" for name in QUANTITIES for statistic in ("mean", "std")),
    "budget_violation_rate",
)
_VALIDATION = ("val/", "eval/")
"""Prefixes of validation metrics, in SFT and in stages that learn from rewards."""


class StepTables(MetricsSink):
    """Both tables of an existing run directory, with one row per step; attempts append to them.

    Raises:
        OSError: a table cannot be opened.
    """

    name = "csv"

    def __init__(self, run_dir: Path) -> None:
        self._training = CsvTable(Path(run_dir) / TRAINING_FILE)
        self._validation = CsvTable(Path(run_dir) / VALIDATION_FILE)

    def log_row(self, row: MetricsRow) -> None:
        """Append `train/` metrics to the training table, `val/` and `eval/` metrics to the validation table.

        A row with both is split. A row with neither, such as the duration of a save, is only in `metrics.jsonl`.

        Raises:
            OSError: a table cannot be written.
        """
        has_training = is_training_row(row.metrics)
        has_validation = any(name.startswith(_VALIDATION) for name in row.metrics)
        if has_training:
            self._training.append(_fields(row, [name for name in row.metrics if not _is_of_validation(name)]))
        if has_validation:
            names = [name for name in row.metrics if _is_of_validation(name) or not has_training]
            self._validation.append(_fields(row, names))

    def close(self, exit_code: int = 0) -> None:
        """Close both tables."""
        self._training.close()
        self._validation.close()


class CsvTable:
    """A CSV file whose columns grow with its rows; created if it is missing.

    Args:
        path: path of the file; a torn last line, from a kill, is removed.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns = _read_header(path) if path.exists() else []
        self._writer = LineWriter.reopen(path, self._is_complete)

    def append(self, fields: Mapping[str, object]) -> None:
        """Add one row.

        Args:
            fields: value by column. A new column is empty in all earlier rows; a column that is missing here is empty
                in this row.

        Raises:
            OSError: the file cannot be written.
        """
        new_columns = [name for name in fields if name not in self._columns]
        if new_columns:
            self._add_columns(new_columns)
        self._writer.write(_encode([fields.get(name, "") for name in self._columns]))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._writer.close()

    def _is_complete(self, line: bytes) -> bool:
        # without its newline, a line may have lost digits of its last number
        return line.endswith(b"\n") and len(_decode(line)) == len(self._columns)

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
    return name.startswith(_VALIDATION) or any(f"/{prefix}" in name for prefix in _VALIDATION)


def _fields(row: MetricsRow, names: Sequence[str]) -> dict[str, object]:
    return {**dict(zip(KEY_COLUMNS, row)), **{name: row.metrics[name] for name in names}}


def _read_header(path: Path) -> list[str]:
    with open(path, "rb") as file:
        header = file.readline()
    return _decode(header) if header.endswith(b"\n") else []


def _encode(values: Sequence[object]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(values)
    return buffer.getvalue()


def _decode(line: bytes) -> list[str]:
    return next(csv.reader([line.decode(errors="replace")]), [])


# One row per epoch, in the stage budget


@dataclass
class EpochSums:
    """Running sums over the samples of an epoch; checkpoints save them, so that a resumed epoch counts all samples.

    Attributes:
        num_steps: number of steps with a finite loss.
        num_samples: number of samples over all ranks.
        sums: by name, `loss` over steps; each quantity, `QUANTITY squared`, and `over` (budget) over samples.
    """

    num_steps: int = 0
    num_samples: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, num_samples: int, statistics: Mapping[str, float], loss: float | None = None) -> None:
        """Add some samples.

        Args:
            num_samples: number of samples over all ranks.
            statistics: their `QUANTITY_mean` and `QUANTITY_std`, and `budget_violation_rate`.
            loss: loss of their step, for training samples.
        """
        self.num_samples += num_samples
        for name in QUANTITIES:
            mean, std = statistics[f"{name}_mean"], statistics[f"{name}_std"]
            self._add(name, num_samples * mean)
            self._add(f"{name} squared", num_samples * (mean**2 + std**2))
        self._add("over", num_samples * statistics["budget_violation_rate"])
        if loss is not None and math.isfinite(loss):
            self.num_steps += 1
            self._add("loss", loss)

    def row(self, epoch: int) -> dict[str, float]:
        """Return the row of an epoch, with `EPOCH_COLUMNS`; the loss is NaN if no step had one."""
        row: dict[str, float] = {"epoch": epoch}
        row["loss"] = self.sums["loss"] / self.num_steps if self.num_steps else math.nan
        for name in QUANTITIES:
            mean = self.sums[name] / self.num_samples
            row[f"{name}_mean"] = mean
            row[f"{name}_std"] = math.sqrt(max(0.0, self.sums[f"{name} squared"] / self.num_samples - mean**2))
        return {**row, "budget_violation_rate": self.sums["over"] / self.num_samples}

    def _add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value


class EpochTables(MetricsSink):
    """Both tables with one row per epoch."""

    name = "csv"

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def log_epoch(self, split: str, row: Mapping[str, float]) -> None:
        """Add an epoch to its table; it replaces the same and later epochs from before a resume.

        Raises:
            OSError: the table cannot be written.
        """
        path = self._run_dir / EPOCH_FILES[split]
        previous = list(csv.DictReader(io.StringIO(path.read_text()))) if path.is_file() else []
        kept = [each for each in previous if each.keys() == set(EPOCH_COLUMNS) and int(each["epoch"]) < row["epoch"]]
        text = io.StringIO()
        table = csv.DictWriter(text, EPOCH_COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows([*kept, row])
        replace_file(path, [text.getvalue()])
