"""Whether a lower loss goes with more answers that run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval_pipeline.figures.evaluated import EvaluatedModel
from eval_pipeline.figures.plots.labels import label_points
from eval_pipeline.figures.plots.style import panels, percent_axis, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

LOSS_PLOT = "loss_against_success.png"

_LOSSES = ("val/loss", "train/loss")
_METRIC = "exec_success_rate"
_WIDE = 20  # largest loss over smallest, from which on only a logarithmic axis keeps the points apart
_COLOURS = "viridis"  # even to the eye, and in grey too


@dataclass(frozen=True)
class LossHistory:
    """A run's loss.

    Attributes:
        name: `val/loss` or `train/loss`.
        values: finite losses by step, of evaluated steps alone.
    """

    name: str
    values: Mapping[int, float]

    def at(self, step: int) -> float | None:
        """The loss at just this step; None where there is none."""
        return self.values.get(step)


def loss_history(rows: Iterable[Mapping[str, Any]], steps: Collection[int]) -> LossHistory | None:
    """Take the loss at the evaluated steps out of a run's rows.

    Args:
        rows: of `metrics.jsonl`, oldest first; a step that was done again by a later attempt has the later loss.
        steps: those of the evaluated checkpoints.

    Returns:
        The loss of validation if it was measured at as many of these steps as that of training, else the latter: a
        loss of another step would say nothing about the checkpoint. None where no such step has a finite loss.
    """
    values: dict[str, dict[int, float]] = {name: {} for name in _LOSSES}
    for row in rows:
        for name in _LOSSES:
            if row["step"] in steps and name in row and np.isfinite(row[name]):
                values[name][row["step"]] = row[name]
    most = max(_LOSSES, key=lambda name: len(values[name]))
    return LossHistory(most, values[most]) if values[most] else None


def plot_loss(
    directory: Path, datasets: Sequence[str], losses: LossHistory, history: Sequence[EvaluatedModel]
) -> Path | None:
    """Draw `exec_success_rate` against the loss, a panel for each data set and a point for each checkpoint.

    Args:
        directory: where the PNG goes.
        datasets: names of the panels; one that no checkpoint with a loss has is left out.
        losses: of the run.
        history: checkpoints in the order of their steps.

    Returns:
        The PNG's path, or None where no checkpoint has a loss.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    known = [model for model in history if losses.at(model.saved_at) is not None]
    if not known:
        return None
    shown = [dataset for dataset in datasets if any(dataset in model.datasets for model in known)]
    figure, all_axes = panels(shown, f"{_METRIC} against {losses.name}, with 95 % intervals")
    steps = [model.saved_at for model in known]
    # one checkpoint alone has a scale of colours too
    colours = Normalize(min(steps), max(max(steps), min(steps) + 1))
    if len(steps) > 1:  # before the points: it takes room, which their labels are placed by
        _add_scale(all_axes, ScalarMappable(colours, _COLOURS))
    for axes, dataset in zip(all_axes, shown):
        _draw(axes, dataset, losses, [model for model in known if dataset in model.datasets], colours)
    return write_figure(figure, directory / LOSS_PLOT)


def _draw(axes: Axes, dataset: str, losses: LossHistory, models: Sequence[EvaluatedModel], colours: Normalize) -> None:
    x = np.array([losses.at(model.saved_at) for model in models], dtype=np.float64)
    y = np.array([model.datasets[dataset].figures[_METRIC] for model in models], dtype=np.float64)
    bounds = np.array([model.datasets[dataset].intervals[_METRIC] for model in models]).reshape(-1, 2)
    steps = [model.saved_at for model in models]
    axes.errorbar(x, y, yerr=np.abs(bounds.T - y), fmt="none", ecolor="#BBBBBB", elinewidth=1, zorder=1)
    axes.plot(x, y, color="#888888", linewidth=0.8, zorder=2)
    axes.scatter(x, y, c=steps, cmap=_COLOURS, norm=colours, edgecolor="white", linewidth=0.5, s=42, zorder=3)
    axes.set_xlabel(f"{losses.name} (nat/token)")
    if len(x) and x.min() > 0 and x.max() > _WIDE * x.min():
        axes.set_xscale("log")
    axes.margins(x=0.12)
    percent_axis(axes, _METRIC)
    label_points(axes, x, y, [str(step) for step in steps])


def _add_scale(all_axes: Sequence[Axes], scale: ScalarMappable) -> None:
    from matplotlib.ticker import MaxNLocator

    figure = all_axes[0].figure
    figure.colorbar(scale, ax=all_axes, label="optimizer step", ticks=MaxNLocator(integer=True), fraction=0.04)
