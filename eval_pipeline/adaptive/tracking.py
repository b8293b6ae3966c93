"""Sends a comparison to W&B, into the training run's project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval_pipeline.adaptive.compare import Comparison
from eval_pipeline.adaptive.plot import PARETO_PLOT
from eval_pipeline.adaptive.source import ControllerSource
from eval_pipeline.models.run_config import read_run_config
from verl_ext.metrics.wandb_sink import fill_wandb_run, open_wandb_run

if TYPE_CHECKING:
    from wandb import Run

PREFIX = "eval/adaptive/"
AXIS = f"{PREFIX}budget_ms"


def track(comparison: Comparison, about: Mapping[str, Any], source: ControllerSource, directory: Path) -> None:
    """Log a comparison as a W&B run of its own; when W&B cannot be used, warn and go on.

    Args:
        comparison: what was found.
        about: what it was made by; W&B's configuration of the run.
        source: of the controller.
        directory: of the files.
    """
    run_ms = read_run_config(source.run_dir)
    name = "adaptive_eval" if source.step is None else f"adaptive_eval_step_{source.step}"
    run = open_wandb_run(
        project=run_ms.project,
        name=name,
        directory=source.run_dir or directory,
        config=about,
        group=run_ms.experiment,
        job_type="eval",
    )
    fill_wandb_run(run, lambda run: _log(run, comparison, source.step, directory), results_in=directory)


def budget_figures(comparison: Comparison) -> list[dict[str, float]]:
    """For each budget the figures of all methods, and the budget that is their axis."""
    found: dict[float, dict[str, float]] = {budget: {AXIS: budget} for budget in comparison.budgets_ms}
    for row in comparison.rows:
        figures = asdict(row)
        method, budget = figures.pop("method"), figures.pop("budget_ms")
        found[budget].update({f"{PREFIX}{method}_{figure}": value for figure, value in figures.items()})
    return list(found.values())


def summary_figures(comparison: Comparison) -> dict[str, float]:
    """What it comes to, as far as there is a figure."""
    figures = asdict(comparison.summary)
    interval = figures.pop("interval") or ()
    bounds = {f"controller_minus_lookup_table_{side}": bound for side, bound in zip(("low", "high"), interval)}
    return {f"{PREFIX}{name}": value for name, value in {**figures, **bounds}.items() if value is not None}


def _log(run: Run, comparison: Comparison, step: int | None, directory: Path) -> None:
    import wandb

    rows = [asdict(row) for row in comparison.rows]
    budgets = budget_figures(comparison)
    of_step = {} if step is None else {"global_step": step}  # as in every run of the project
    for name in budgets[0]:  # each by its name: `*` has another axis already
        run.define_metric(name, step_metric=None if name == AXIS else AXIS)
    for figures in budgets:
        run.log({**figures, **of_step})
    table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
    run.log({f"{PREFIX}rows": table, f"{PREFIX}pareto": wandb.Image(str(directory / PARETO_PLOT)), **of_step})
    run.summary.update(summary_figures(comparison))
