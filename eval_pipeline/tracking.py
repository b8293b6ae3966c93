"""Sends an evaluation's figures to W&B, beside the training run's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval_pipeline.checkpoint import Checkpoint
from eval_pipeline.report import Figures
from eval_pipeline.run_config import RunConfig
from verl_ext.metrics.notice import warn


def wandb_figures(dataset: str, figures: Figures) -> dict[str, float | int]:
    """The figures under the keys `eval/<dataset>/<metric>`, without those that do not exist."""
    return {f"eval/{dataset}/{name}": value for name, value in figures.items() if value is not None}


def log_to_wandb(
    checkpoint: Checkpoint,
    run_config: RunConfig,
    directory: Path,
    config: Mapping[str, Any],
    figures: Mapping[str, Any],
) -> None:
    """Log one evaluation as the run `phase1_eval_step_<N>`; when W&B cannot be used, warn and go on.

    Args:
        checkpoint: what was evaluated; its step goes into the run's summary.
        run_config: project and group of the run.
        directory: where W&B keeps its files.
        config: the evaluation's settings, the step among them.
        figures: values by their W&B keys.
    """
    from verl_ext.metrics.wandb_run import open_wandb_run

    run = open_wandb_run(
        project=run_config.project,
        name=f"phase1_eval_{checkpoint.label}",
        directory=directory,
        config=config,
        group=run_config.experiment,
        job_type="eval",
    )
    if run is None:
        return
    try:
        # `global_step` is the axis of every chart, in training too; a model without a step has a row without it
        run.log(dict(figures) if checkpoint.step is None else {**figures, "global_step": checkpoint.step})
        run.summary["step"] = checkpoint.step
        run.finish()
    except Exception as error:  # W&B raises errors of many kinds, and the figures are on the disk already
        warn(f"W&B did not take the figures ({type(error).__name__}: {error}); they are in metrics.json.")
