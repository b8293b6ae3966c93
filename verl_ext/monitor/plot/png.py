"""Charts as PNG files."""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from verl_ext.monitor.charts import Chart, charts_for
from verl_ext.monitor.curves.smooth import is_worth_smoothing, smooth
from verl_ext.monitor.options import COLOURS, FAINT, GREY
from verl_ext.monitor.view import RunView

SIZE_INCHES = (8.0, 4.5)
DOTS_PER_INCH = 120


def write_charts(view: RunView, directory: Path, smoothing: float) -> list[Path]:
    """Draw every chart of a run.

    Args:
        view: of the run.
        directory: that the files go to.
        smoothing: weight of `smooth`.

    Raises:
        OSError: a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    return [_write(view, chart, directory, smoothing) for chart in charts_for(view.metrics)]


def _write(view: RunView, chart: Chart, directory: Path, smoothing: float) -> Path:
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    for metric, colour in zip(chart.metrics, COLOURS):
        _draw_curve(axes, view, chart, metric, colour, smoothing)
    if chart.with_schedule and (points := view.schedule_points()):
        axes.plot(*zip(*points), color=GREY, ls="--", lw=1, label="schedule")
    _draw_marks(axes, view, chart)
    axes.set(title=f"{chart.name} · {view.record['path']}", xlabel="steps over all attempts")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path = directory / f"{re.sub(r'[^a-z0-9]+', '_', chart.name.lower())}.png"
    figure.savefig(path)
    return path


def _draw_curve(axes: Axes, view: RunView, chart: Chart, metric: str, colour: str, smoothing: float) -> None:
    """The curve, or its smoothed one in front of it."""
    curve = view.curve(metric)
    x, values = curve.points()
    if chart.with_schedule or not is_worth_smoothing(len(values), smoothing):
        axes.plot(x, values * chart.scale, color=colour, lw=1, label=metric)
        return
    axes.plot(x, values * chart.scale, color=colour, alpha=FAINT, lw=1)
    middle, means = curve.means()
    axes.plot(middle, smooth(means, smoothing) * chart.scale, color=colour, lw=2, label=metric)


def _draw_marks(axes: Axes, view: RunView, chart: Chart) -> None:
    """Where attempts begin, and the chart's own line."""
    for attempt, place in view.starts.items():
        if attempt != min(view.starts):
            axes.axvline(place, color=GREY, ls=":", lw=1)
            axes.annotate(f"attempt {attempt}", (place, 1), xycoords=("data", "axes fraction"), fontsize=8, color=GREY)
    if chart.line is not None:
        axes.axhline(chart.line, color="#ef4444", lw=1)
