"""The plots of a report: rates over steps, distribution of error types, and success rate against loss."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval_pipeline.report.metrics import CODE_METRIC
from eval_pipeline.report.plot_style import (
    BLUE,
    ERROR_COLORS,
    GRAY,
    ORANGE,
    label_points,
    legend_below,
    panels,
    percent_axis,
    step_axis,
    write_figure,
)
from eval_pipeline.report.results import EvaluatedModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

RATES_PLOT = "rates_over_steps.png"
ERRORS_PLOT = "error_distribution.png"
LOSS_PLOT = "loss_against_success.png"

_RATE_LINES = {CODE_METRIC: (BLUE, "o"), "accepted_at_1": (ORANGE, "s")}
_FEW_STEPS = 8  # with so few points, a band is hard to read, so error bars are drawn too
_MAX_BAR_LABELS = 16
_LOSSES = ("val/loss", "train/loss")
_LOG_SCALE_RATIO = 20  # of largest to smallest loss
_STEP_COLORS = "viridis"  # perceptually uniform, also in grayscale


def short_name(baseline: EvaluatedModel) -> str:
    """The name of a baseline in tables and plots."""
    return "base model" if baseline.step is None else baseline.label


def plot_rates(
    directory: Path,
    datasets: Sequence[str],
    baseline: EvaluatedModel,
    best: EvaluatedModel,
    history: Sequence[EvaluatedModel],
    not_run: Collection[str] = (),
) -> Path:
    """Draw `exec_success_rate` and `accepted_at_1` over the steps, one panel per dataset.

    Args:
        datasets: the panels; each was evaluated for some checkpoint.
        baseline: the initial model, whose rates are drawn at step 0, or a checkpoint; horizontal lines show its rates.
        best: the best checkpoint, whose step is marked.
        history: checkpoints, ordered by step.
        not_run: datasets whose answers are not run, so that they have no `exec_success_rate`.
    """
    figure, all_axes = panels(datasets, "Rates over the training, with 95% intervals")
    for axes, dataset in zip(all_axes, datasets):
        evaluated = [model for model in history if dataset in model.datasets]
        _draw_rates(axes, dataset, evaluated, baseline, _rates_of(dataset, not_run))
        axes.axvline(best.saved_at, color=GRAY, linestyle=":", zorder=1, label=f"best checkpoint (step {best.step})")
    legend_below(figure, all_axes, max_columns=3)
    return write_figure(figure, directory / RATES_PLOT)


def _rates_of(dataset: str, not_run: Collection[str]) -> list[str]:
    """The rates of a dataset, the one that selects by default first."""
    return [metric for metric in _RATE_LINES if metric != CODE_METRIC or dataset not in not_run]


def _draw_rates(
    axes: Axes, dataset: str, evaluated: Sequence[EvaluatedModel], baseline: EvaluatedModel, metrics: Sequence[str]
) -> None:
    start = [(0, baseline.datasets[dataset])] if dataset in baseline.datasets and baseline.step is None else []
    points = start + [(model.saved_at, model.datasets[dataset]) for model in evaluated]
    steps, results = [step for step, _ in points], [result for _, result in points]
    for metric in metrics:
        color, marker = _RATE_LINES[metric]
        rates = np.array([result.metrics[metric] for result in results])
        bounds = np.array([result.intervals[metric] for result in results])
        axes.plot(steps, rates, color=color, marker=marker, markersize=4, label=metric)
        axes.fill_between(steps, bounds[:, 0], bounds[:, 1], color=color, alpha=0.18, linewidth=0)
        if len(steps) <= _FEW_STEPS:
            axes.errorbar(steps, rates, yerr=np.abs(bounds.T - rates), color=color, fmt="none", capsize=3)
        if dataset in baseline.datasets:
            base, name = baseline.datasets[dataset].rate(metric), short_name(baseline)
            axes.axhline(base, color=color, linestyle="--", linewidth=1.2, label=f"{metric}, {name}")
    step_axis(axes, steps)
    percent_axis(axes, "share of answers")


def plot_errors(
    directory: Path,
    datasets: Sequence[str],
    baseline: EvaluatedModel,
    best: EvaluatedModel,
    history: Sequence[EvaluatedModel],
) -> Path:
    """Draw the shares of the six error types as stacked bars, one panel per dataset and one bar per model.

    For the arguments, see `plot_rates`.
    """
    figure, all_axes = panels(datasets, "How the answers ended")
    models = [*([baseline] if baseline.step is None else []), *history]
    for axes, dataset in zip(all_axes, datasets):
        _draw_errors(axes, dataset, [model for model in models if dataset in model.datasets], best)
    legend_below(figure, all_axes, max_columns=6)
    return write_figure(figure, directory / ERRORS_PLOT)


def _draw_errors(axes: Axes, dataset: str, models: Sequence[EvaluatedModel], best: EvaluatedModel) -> None:
    x, below = np.arange(len(models)), np.zeros(len(models))
    for kind, color in ERROR_COLORS.items():
        heights = np.array([model.datasets[dataset].metrics[f"{kind}_rate"] for model in models])
        axes.bar(x, heights, 0.8, bottom=below, color=color, edgecolor="white", linewidth=0.5, label=kind)
        below += heights
    for bar, model in enumerate(models):
        if model.step == best.step:
            axes.annotate("best", (bar, 1), xytext=(0, 2), textcoords="offset points", ha="center", fontsize="small")
    names = ["base" if model.step is None else str(model.step) for model in models]
    named = range(0, len(models), -(-len(models) // _MAX_BAR_LABELS))  # always includes the base model
    axes.set_xticks(named, [names[bar] for bar in named], rotation=45 if len(named) > 8 else 0)
    axes.set_xlim(-0.8, max(len(models) - 0.2, 2.2))
    axes.set_xlabel("optimizer step")
    percent_axis(axes, "share of answers", margin=0)


@dataclass(frozen=True)
class LossHistory:
    """The loss of a run."""

    name: str
    """`val/loss` or `train/loss`."""
    values: Mapping[int, float]
    """Finite losses by step, for evaluated steps only."""


def loss_history(rows: Iterable[Mapping[str, Any]], steps: Collection[int]) -> LossHistory | None:
    """Extract the loss at the evaluated steps.

    Args:
        rows: rows of `metrics.jsonl`, oldest first; a later row of the same step takes precedence.
        steps: steps of the evaluated checkpoints.

    Returns:
        The validation loss if it was measured at as many of these steps as the training loss, otherwise the training
        loss. Losses of other steps say nothing about a checkpoint. None if none of these steps has a finite loss.
    """
    values: dict[str, dict[int, float]] = {name: {} for name in _LOSSES}
    for row in rows:
        for name in _LOSSES:
            if row["step"] in steps and name in row and np.isfinite(row[name]):
                values[name][row["step"]] = row[name]
    longest = max(_LOSSES, key=lambda name: len(values[name]))
    return LossHistory(longest, values[longest]) if values[longest] else None


def plot_loss(
    directory: Path,
    datasets: Sequence[str],
    losses: LossHistory,
    history: Sequence[EvaluatedModel],
    not_run: Collection[str] = (),
) -> Path:
    """Draw the success rate against the loss, one panel per dataset and one point per checkpoint.

    The success rate is `exec_success_rate`, or `accepted_at_1` if answers are not run.

    Args:
        datasets: the panels; a dataset without a checkpoint with a loss is skipped.
        history: checkpoints, ordered by step, at least one of them with a loss.
        not_run: see `plot_rates`.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    known = [model for model in history if model.saved_at in losses.values]
    shown = [dataset for dataset in datasets if any(dataset in model.datasets for model in known)]
    metrics = [_rates_of(dataset, not_run)[0] for dataset in shown]
    figure, all_axes = panels(
        shown, f"{' and '.join(dict.fromkeys(metrics))} against {losses.name}, with 95% intervals"
    )
    steps = [model.saved_at for model in known]
    colors = Normalize(min(steps), max(max(steps), min(steps) + 1))  # also valid for a single checkpoint
    if len(steps) > 1:  # before the points, because its space affects where labels fit
        scale, ticks = ScalarMappable(colors, _STEP_COLORS), MaxNLocator(integer=True)
        figure.colorbar(scale, ax=all_axes, label="optimizer step", ticks=ticks, fraction=0.04)
    for axes, dataset, metric in zip(all_axes, shown, metrics):
        _draw_loss(axes, dataset, metric, losses, [model for model in known if dataset in model.datasets], colors)
    return write_figure(figure, directory / LOSS_PLOT)


def _draw_loss(
    axes: Axes, dataset: str, metric: str, losses: LossHistory, models: Sequence[EvaluatedModel], colors: Normalize
) -> None:
    x = np.array([losses.values[model.saved_at] for model in models], dtype=np.float64)
    y = np.array([model.datasets[dataset].metrics[metric] for model in models], dtype=np.float64)
    bounds = np.array([model.datasets[dataset].intervals[metric] for model in models])
    steps = [model.saved_at for model in models]
    axes.errorbar(x, y, yerr=np.abs(bounds.T - y), fmt="none", ecolor="#BBBBBB", elinewidth=1, zorder=1)
    axes.plot(x, y, color="#888888", linewidth=0.8, zorder=2)
    axes.scatter(x, y, c=steps, cmap=_STEP_COLORS, norm=colors, edgecolor="white", linewidth=0.5, s=42, zorder=3)
    axes.set_xlabel(f"{losses.name} (nat/token)")
    if x.min() > 0 and x.max() > _LOG_SCALE_RATIO * x.min():
        axes.set_xscale("log")
    axes.margins(x=0.12)
    percent_axis(axes, metric)
    label_points(axes, x, y, [str(step) for step in steps])
