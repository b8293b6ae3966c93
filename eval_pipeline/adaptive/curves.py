"""What a controller's training brought, epoch by epoch."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from eval_pipeline.adaptive.source import ControllerSource
from eval_pipeline.report.plot_style import BLUE, ORANGE, legend_below, panels, percent_axis, write_figure
from verl_ext.metrics.csv_tables import TRAINING_FILE, VALIDATION_FILE

CURVES_PLOT = "curves.png"
_FILES = {
    TRAINING_FILE: (ORANGE, "training: configurations as drawn"),
    VALIDATION_FILE: (BLUE, "held out: the likeliest"),
}
_PANELS = {
    "reward_mean": "reward",
    "accuracy_mean": "accuracy",
    "latency_mean": "latency (ms)",
    "budget_violation_rate": "over budget",
}
_SHARES = ("accuracy_mean", "budget_violation_rate")
Table = list[Mapping[str, str]]


def plot_curves(directory: Path, source: ControllerSource) -> Path | None:
    """Draw reward, accuracy, latency and violations by epoch, of the run's `training_history.csv` and the other.

    Args:
        directory: where the PNG goes.
        source: of the controller.

    Returns:
        The PNG; None of an export without its run, or a run without these tables.

    Raises:
        OSError: it cannot be written.
    """
    tables = {} if source.run_dir is None else {name: read_table(source.run_dir / name) for name in _FILES}
    if not any(tables.values()):
        return None
    from matplotlib.ticker import MaxNLocator

    figure, all_axes = panels(list(_PANELS.values()), "Training of the controller, by epoch")
    for axes, column in zip(all_axes, _PANELS):
        for name, table in tables.items():
            colour, legend = _FILES[name]
            epochs, values = _column(table, "epoch"), _column(table, column)
            axes.plot(epochs, values, color=colour, marker="o", markersize=4, label=legend)
        if column in _SHARES:
            percent_axis(axes, "")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.set_xlabel("epoch")
    legend_below(figure, all_axes, most_columns=2)
    return write_figure(figure, directory / CURVES_PLOT)


def read_table(path: Path) -> Table:
    """The rows of a table; none where there is no such file."""
    if not path.is_file():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _column(table: Sequence[Mapping[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in table]
