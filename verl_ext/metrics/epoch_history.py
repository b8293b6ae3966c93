"""What a run learnt epoch by epoch: means and deviations over all samples of an epoch, as tables and curves."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verl_ext.files import replace_file
from verl_ext.metrics.csv_history import TRAINING_FILE, VALIDATION_FILE
from verl_ext.metrics.row import Row

QUANTITIES = ("reward", "accuracy", "latency")
COLUMNS = (
    "epoch",
    "loss",
    *(f"{name}_{kind}" for name in QUANTITIES for kind in ("mean", "std")),
    "budget_violation_rate",
)
TABLES = {"Train": TRAINING_FILE, "Val": VALIDATION_FILE}


@dataclass
class EpochSums:
    """What has been seen of an epoch; goes into checkpoints, so that a resumed epoch counts all of its samples.

    Attributes:
        num_steps: with a loss.
        num_samples: of all ranks.
        sums: by name: `loss` over steps; of each quantity its values and their squares, and `over`, over samples.
    """

    num_steps: int = 0
    num_samples: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, num_samples: int, figures: Mapping[str, float], loss: float | None = None) -> None:
        """Count some samples.

        Args:
            num_samples: of all ranks.
            figures: their `QUANTITY_mean` and `QUANTITY_std`, and `budget_violation_rate`.
            loss: of the step that they are of.
        """
        self.num_samples += num_samples
        for name in QUANTITIES:
            mean, std = figures[f"{name}_mean"], figures[f"{name}_std"]
            self._add(name, num_samples * mean)
            self._add(f"{name} squared", num_samples * (mean**2 + std**2))
        self._add("over", num_samples * figures["budget_violation_rate"])
        if loss is not None and math.isfinite(loss):
            self.num_steps += 1
            self._add("loss", loss)

    def row(self, epoch: int) -> dict[str, float]:
        """The epoch by `COLUMNS`; the loss is NaN where there was none."""
        found: dict[str, float] = {"epoch": epoch}
        found["loss"] = self.sums["loss"] / self.num_steps if self.num_steps else math.nan
        for name in QUANTITIES:
            mean = self.sums[name] / self.num_samples
            found[f"{name}_mean"] = mean
            found[f"{name}_std"] = math.sqrt(max(0.0, self.sums[f"{name} squared"] / self.num_samples - mean**2))
        return {**found, "budget_violation_rate": self.sums["over"] / self.num_samples}

    def _add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value


class EpochTables:
    """`training_history.csv` and `validation_history.csv` with one row for each epoch.

    Args:
        run_dir: where the tables are.
    """

    name = "csv"

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def write(self, row: Row) -> None:
        """Steps are not in these tables."""

    def write_epoch(self, kind: str, row: Mapping[str, float]) -> None:
        """Add an epoch's row to its table.

        Rows of that epoch and later ones, which a run wrote that was resumed before them, are replaced.

        Args:
            kind: Train or Val.
            row: by `COLUMNS`.

        Raises:
            OSError: the disk refuses it.
        """
        path = self._run_dir / TABLES[kind]
        former = list(csv.DictReader(io.StringIO(path.read_text()))) if path.is_file() else []
        kept = [each for each in former if each.keys() == set(COLUMNS) and int(each["epoch"]) < row["epoch"]]
        text = io.StringIO()
        table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows([*kept, row])
        replace_file(path, [text.getvalue()])

    def close(self, exit_code: int = 0) -> None:
        """Nothing is kept open."""


def tags_of(kind: str, row: Mapping[str, float]) -> dict[str, float]:
    """A row as TensorBoard shows it: `Train/Loss`, `Train/Reward_Mean`, `Val/Budget_Violation_Rate` and so on."""
    values = {name: value for name, value in row.items() if name != "epoch" and not math.isnan(value)}
    return {f"{kind}/{name.title()}": value for name, value in values.items()}


def line_of(kind: str, row: Mapping[str, float]) -> str:
    """A row for the console."""
    parts = [] if math.isnan(row["loss"]) else [f"loss {row['loss']:.4f}"]
    parts += [f"{name} {row[f'{name}_mean']:.4f} (std {row[f'{name}_std']:.4f})" for name in ("reward", "accuracy")]
    parts.append(f"latency {row['latency_mean']:.2f} ms (std {row['latency_std']:.2f} ms)")
    parts.append(f"over budget {row['budget_violation_rate']:.1%}")
    return f"{kind} epoch {row['epoch']:.0f}: {', '.join(parts)}"
