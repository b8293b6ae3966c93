"""Charts of a W&B run that compare metrics, in the section `Dashboard` of its page.

W&B draws one panel for each metric by itself. Panels with several metrics belong to a saved view, which only its server
can create. A run therefore logs them as custom charts, which also exist after `wandb sync` of an offline run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wandb import Run

CHARTS: Mapping[str, tuple[str, ...]] = {
    "Loss": ("train/loss", "val/loss"),
    "Learning rate": ("train/lr(1e-3)",),
    "Gradient norm": ("train/grad_norm",),
    "Step time": ("train/time(s)",),
    "Reward": ("train/reward_total_mean", "eval/reward_total_mean"),
    "Advantage": ("train/adv_mean", "train/adv_std"),
    "Entropy": ("train/entropy",),
    "Accuracy": ("train/accuracy_mean", "eval/accuracy_mean"),
    "Latency and budget": ("train/latency_ms_mean", "train/budget_ms_mean"),
    "Budget violations": ("train/budget_violation_mean", "eval/budget_violation_mean"),
}
"""Metrics of each chart. The metrics of a chart have one unit."""
MAX_POINTS = 2000
"""Maximum number of points of a metric; W&B draws at most 10,000 rows of a table."""
INTERVAL_S = 600.0
"""Minimum seconds between two uploads of the charts; each uploads all points as tables."""


class WandbDashboard:
    """Collects the metrics of `CHARTS`, and logs the charts.

    Args:
        run: the W&B run.
        earlier: rows of earlier starts of the run, with `step` and metrics.
    """

    def __init__(self, run: Run, earlier: Iterable[Mapping[str, Any]]) -> None:
        self._run = run
        self._points = {name: _Points() for names in CHARTS.values() for name in names}
        self._logged_at = 0.0
        for row in earlier:
            self.add(row["step"], row)

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a row of metrics. Later points than the step, from before a restart, are dropped."""
        for name, points in self._points.items():
            if name in metrics:
                points.add(step, metrics[name])

    def log(self, *, now: bool = False) -> None:
        """Log all charts that have points, unless they were logged within `INTERVAL_S`.

        Args:
            now: log them in any case, at the end of the run.
        """
        import wandb

        if not now and time.monotonic() - self._logged_at < INTERVAL_S:
            return
        self._logged_at = time.monotonic()
        charts, last_step = {}, 0
        for title, names in CHARTS.items():
            curves = {name: self._points[name] for name in names if self._points[name].steps}
            if curves:
                steps, values = ([getattr(each, part) for each in curves.values()] for part in ("steps", "values"))
                charts[f"Dashboard/{title}"] = wandb.plot.line_series(
                    steps, values, keys=list(curves), title=title, xname="global_step", split_table=True
                )
                last_step = max(last_step, *(points.steps[-1] for points in curves.values()))
        if charts:
            self._run.log({**charts, "global_step": last_step})


class _Points:
    """Points of a metric, thinned evenly to at most `MAX_POINTS`."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self._stride, self._num_skipped = 1, 0

    def add(self, step: int, value: float) -> None:
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self._num_skipped += 1
        if self._num_skipped < self._stride:
            return
        self._num_skipped = 0
        self.steps.append(step)
        self.values.append(value)
        if len(self.steps) > MAX_POINTS:
            self._stride *= 2
            del self.steps[1::2], self.values[1::2]
