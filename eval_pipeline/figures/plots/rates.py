"""Rates over the steps of a run, with their intervals and the base model's beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eval_pipeline.figures.evaluated import DatasetResult, EvaluatedModel
from eval_pipeline.figures.plots.style import (
    BLUE,
    GREY,
    ORANGE,
    legend_below,
    panels,
    percent_axis,
    step_axis,
    write_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATES_PLOT = "rates_over_steps.png"

_LINES = {"exec_success_rate": (BLUE, "o"), "accepted_at_1": (ORANGE, "s")}
_FEW = 8  # steps; a band between so few points, or around one, is hard to read, and bars are drawn too


def plot_rates(
    directory: Path,
    datasets: Sequence[str],
    baseline: EvaluatedModel,
    best: EvaluatedModel,
    history: Sequence[EvaluatedModel],
) -> Path:
    """Draw `exec_success_rate` and `accepted_at_1` over the steps, a panel for each data set.

    Args:
        directory: where the PNG goes.
        datasets: names of the panels, each of which some checkpoint has.
        baseline: what training started from, so its rates are those of step 0; drawn as horizontal lines too.
        best: its step is marked.
        history: checkpoints in the order of their steps.
    """
    figure, all_axes = panels(datasets, "Rates over the training, with 95 % intervals")
    for axes, dataset in zip(all_axes, datasets):
        evaluated = [model for model in history if dataset in model.datasets]
        _draw(axes, dataset, evaluated, baseline.datasets.get(dataset))
        axes.axvline(best.saved_at, color=GREY, linestyle=":", zorder=1, label=f"best checkpoint (step {best.step})")
    legend_below(figure, all_axes, most_columns=3)
    return write_figure(figure, directory / RATES_PLOT)


def _draw(axes: Axes, dataset: str, evaluated: Sequence[EvaluatedModel], baseline: DatasetResult | None) -> None:
    start = [] if baseline is None else [(0, baseline)]
    points = start + [(model.saved_at, model.datasets[dataset]) for model in evaluated]
    steps, results = [step for step, _ in points], [result for _, result in points]
    for metric, (colour, marker) in _LINES.items():
        rates = np.array([result.figures[metric] for result in results])
        bounds = np.array([result.intervals[metric] for result in results])
        axes.plot(steps, rates, color=colour, marker=marker, markersize=4, label=metric)
        axes.fill_between(steps, bounds[:, 0], bounds[:, 1], color=colour, alpha=0.18, linewidth=0)
        if len(steps) <= _FEW:
            axes.errorbar(steps, rates, yerr=np.abs(bounds.T - rates), color=colour, fmt="none", capsize=3)
        if baseline is not None:
            base = baseline.rate(metric)
            axes.axhline(base, color=colour, linestyle="--", linewidth=1.2, label=f"{metric}, base model")
    step_axis(axes, steps)
    percent_axis(axes, "share of answers")
