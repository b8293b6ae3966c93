"""Accuracy against latency: the static configurations and what each method makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from eval_pipeline.adaptive.baselines import ALLOWED_VIOLATIONS
from eval_pipeline.adaptive.compare import Comparison
from eval_pipeline.adaptive.results import Results
from eval_pipeline.report.plot_style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    VERMILLION,
    label_points,
    legend_below,
    panels,
    write_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARETO_PLOT = "pareto.png"

_LINES = {
    "oracle": (GREEN, "^", "oracle"),
    "lookup_table": (ORANGE, "s", "lookup table"),
    "controller": (BLUE, "o", "controller"),
}


def plot_pareto(directory: Path, comparison: Comparison) -> Path:
    """Draw mean accuracy against mean latency; the controller's points are labelled with their budgets.

    Args:
        directory: where the PNG goes.
        comparison: what was found.
    """
    samples = len(comparison.measured.statics.accuracy)
    late = f"hollow where more than {100 * ALLOWED_VIOLATIONS:.0f} % of the answers are too late"
    figure, [axes] = panels([f"{samples} questions; points of a line are budgets, {late}"], "Accuracy against latency")
    _draw_statics(axes, comparison)
    drawn = _means(comparison.methods["random"])
    axes.scatter(*drawn, color=PURPLE, marker="v", s=30, label="drawn at random", zorder=3)
    latency, accuracy = _means(comparison.methods["full"])
    axes.scatter(latency[:1], accuracy[:1], color=VERMILLION, marker="*", s=190, label="all of it", zorder=3)
    for name, (colour, marker, label) in _LINES.items():
        _draw_line(axes, comparison, name, colour=colour, marker=marker, label=label)
    _scale(axes)
    _label_budgets(axes, comparison)
    legend_below(figure, [axes], most_columns=3)
    return write_figure(figure, directory / PARETO_PLOT)


def _draw_statics(axes: Axes, comparison: Comparison) -> None:
    latency, accuracy = _means(comparison.measured.statics)
    axes.scatter(latency, accuracy, color="#BBBBBB", s=22, label="static configurations", zorder=2)
    front = comparison.front
    # between two configurations of the front nothing better than the quicker one is to be had
    style: dict[str, Any] = {
        "color": "#888888",
        "linewidth": 1.0,
        "where": "post",
        "label": "their Pareto front",
        "zorder": 2,
    }
    axes.step(latency[front], accuracy[front], **style)


def _draw_line(axes: Axes, comparison: Comparison, name: str, *, colour: str, marker: str, label: str) -> None:
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


def _label_budgets(axes: Axes, comparison: Comparison) -> None:
    from matplotlib.patheffects import withStroke

    latency, accuracy = _means(comparison.methods["controller"])
    label_points(axes, latency, accuracy, [f"{budget:.0f} ms" for budget in comparison.budgets_ms])
    for text in axes.texts:  # lines and points go on below them
        text.set(color=BLUE, zorder=6, path_effects=[withStroke(linewidth=3, foreground="white")])


def _means(results: Results) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return results.latency_ms.mean(0), results.accuracy.mean(0)
