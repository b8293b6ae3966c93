"""The two plots of a report: accuracy against latency, and the controller's training by epoch."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from eval_pipeline.report.plot_style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    VERMILLION,
    label_points,
    legend_below,
    panels,
    percent_axis,
    write_figure,
)
from verl_ext.controller.evaluation.results import ALLOWED_VIOLATIONS, ControllerComparison, ResultMatrices
from verl_ext.controller.source import ControllerSource
from verl_ext.metrics.csv_tables import TRAINING_FILE, VALIDATION_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARETO_PLOT, CURVES_PLOT = "pareto.png", "curves.png"

_LINES = {
    "oracle": (GREEN, "^", "oracle"),
    "lookup_table": (ORANGE, "s", "lookup table"),
    "controller": (BLUE, "o", "controller"),
}
_TABLES = {
    TRAINING_FILE: (ORANGE, "training: sampled configurations"),
    VALIDATION_FILE: (BLUE, "validation: most likely configuration"),
}
_PANELS = {
    "reward_mean": "reward",
    "accuracy_mean": "accuracy",
    "latency_mean": "latency (ms)",
    "budget_violation_rate": "over budget",
}
_SHARES = ("accuracy_mean", "budget_violation_rate")


def plot_pareto(directory: Path, comparison: ControllerComparison) -> Path:
    """Plot mean accuracy against mean latency; the controller's points are labelled with their budgets.

    Args:
        directory: of the PNG.
        comparison: the results.
    """
    samples = len(comparison.measured.statics.accuracy)
    late = f"hollow if more than {100 * ALLOWED_VIOLATIONS:.0f} % of the answers exceed the budget"
    title = f"{samples} questions; the points of a line are budgets, {late}"
    figure, [axes] = panels([title], "Accuracy against latency")
    _plot_statics(axes, comparison)
    means = _means(comparison.methods["random"])
    axes.scatter(*means, color=PURPLE, marker="v", s=30, label="random", zorder=3)
    latency, accuracy = _means(comparison.methods["full"])
    axes.scatter(latency[:1], accuracy[:1], color=VERMILLION, marker="*", s=190, label="full model", zorder=3)
    for name, (colour, marker, label) in _LINES.items():
        _plot_line(axes, comparison, name, colour=colour, marker=marker, label=label)
    _scale(axes)
    _label_budgets(axes, comparison)
    legend_below(figure, [axes], most_columns=3)
    return write_figure(figure, directory / PARETO_PLOT)


def _plot_statics(axes: Axes, comparison: ControllerComparison) -> None:
    latency, accuracy = _means(comparison.measured.statics)
    axes.scatter(latency, accuracy, color="#BBBBBB", s=22, label="static configurations", zorder=2)
    front = comparison.front
    # steps, because between two configurations of the front the faster one is the best available
    style: dict[str, Any] = {
        "color": "#888888",
        "linewidth": 1.0,
        "where": "post",
        "label": "their Pareto front",
        "zorder": 2,
    }
    axes.step(latency[front], accuracy[front], **style)


def _plot_line(
    axes: Axes, comparison: ControllerComparison, name: str, *, colour: str, marker: str, label: str
) -> None:
    latency, accuracy = _means(comparison.methods[name])
    axes.plot(latency, accuracy, color=colour, marker=marker, markersize=7, linewidth=1.5, label=label, zorder=4)
    late = comparison.violation_rates(name) > ALLOWED_VIOLATIONS
    axes.plot(latency[late], accuracy[late], marker, color=colour, markersize=7, markerfacecolor="white", zorder=5)


def _scale(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_ylabel("mean accuracy")
    axes.set_xlabel("mean latency (ms)")
    axes.margins(x=0.06, y=0.1)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -0.02), min(high, 1.02))


def _label_budgets(axes: Axes, comparison: ControllerComparison) -> None:
    from matplotlib.patheffects import withStroke

    latency, accuracy = _means(comparison.methods["controller"])
    label_points(axes, latency, accuracy, [f"{budget:.0f} ms" for budget in comparison.budgets_ms])
    for text in axes.texts:  # lines and points continue below the labels
        text.set(color=BLUE, zorder=6, path_effects=[withStroke(linewidth=3, foreground="white")])


def _means(results: ResultMatrices) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return results.latency_ms.mean(0), results.accuracy.mean(0)


def plot_curves(directory: Path, source: ControllerSource) -> Path | None:
    """Plot reward, accuracy, latency and violations by epoch, from the run's tables of training and validation.

    Args:
        directory: of the PNG.
        source: of the controller.

    Returns:
        The PNG; None for an export outside of a run, or a run without these tables.

    Raises:
        OSError: it cannot be written.
    """
    tables = {} if source.run_dir is None else {name: _read_table(source.run_dir / name) for name in _TABLES}
    if not any(tables.values()):
        return None
    from matplotlib.ticker import MaxNLocator

    figure, all_axes = panels(list(_PANELS.values()), "Training of the controller, by epoch")
    for axes, column in zip(all_axes, _PANELS):
        for name, table in tables.items():
            colour, legend = _TABLES[name]
            epochs, values = ([float(row[key]) for row in table] for key in ("epoch", column))
            axes.plot(epochs, values, color=colour, marker="o", markersize=4, label=legend)
        if column in _SHARES:
            percent_axis(axes, "")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.set_xlabel("epoch")
    legend_below(figure, all_axes, most_columns=2)
    return write_figure(figure, directory / CURVES_PLOT)


def _read_table(path: Path) -> list[Mapping[str, str]]:
    """The rows of a CSV table; empty if there is no such file."""
    if not path.is_file():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
