"""How the answers ended, from the base model over the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eval_pipeline.figures.evaluated import EvaluatedModel
from eval_pipeline.figures.plots.style import ERROR_COLOURS, legend_below, panels, percent_axis, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ERRORS_PLOT = "error_distribution.png"

_MOST_LABELS = 16


def plot_errors(
    directory: Path,
    datasets: Sequence[str],
    baseline: EvaluatedModel,
    best: EvaluatedModel,
    history: Sequence[EvaluatedModel],
) -> Path:
    """Draw the shares of the six error types as stacked bars, a panel for each data set and a bar for each model.

    Args:
        directory: where the PNG goes.
        datasets: names of the panels.
        baseline: the first bar.
        best: its bar is marked.
        history: checkpoints in the order of their steps.
    """
    figure, all_axes = panels(datasets, "How the answers ended")
    for axes, dataset in zip(all_axes, datasets):
        _draw(axes, dataset, [model for model in (baseline, *history) if dataset in model.datasets], best)
    legend_below(figure, all_axes, most_columns=6)
    return write_figure(figure, directory / ERRORS_PLOT)


def _draw(axes: Axes, dataset: str, models: Sequence[EvaluatedModel], best: EvaluatedModel) -> None:
    places, below = np.arange(len(models)), np.zeros(len(models))
    for kind, colour in ERROR_COLOURS.items():
        heights = np.array([model.datasets[dataset].figures[f"{kind}_rate"] for model in models])
        axes.bar(places, heights, 0.8, bottom=below, color=colour, edgecolor="white", linewidth=0.5, label=kind)
        below += heights
    _mark_best(axes, models, best)
    # the base model is always named; the best is marked
    every = -(-len(models) // _MOST_LABELS)
    named = range(0, len(models), every)
    axes.set_xticks(named, [_name(models[place]) for place in named], rotation=45 if len(named) > 8 else 0)
    axes.set_xlim(-0.8, max(len(models) - 0.2, 2.2))
    axes.set_xlabel("optimizer step")
    percent_axis(axes, "share of answers", margin=0)


def _mark_best(axes: Axes, models: Sequence[EvaluatedModel], best: EvaluatedModel) -> None:
    for place, model in enumerate(models):
        if model.step == best.step:
            axes.annotate("best", (place, 1), xytext=(0, 2), textcoords="offset points", ha="center", fontsize="small")


def _name(model: EvaluatedModel) -> str:
    return "base" if model.step is None else str(model.step)
