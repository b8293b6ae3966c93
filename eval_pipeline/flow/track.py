"""Sends published figures to the training run's W&B project."""

from __future__ import annotations

import hashlib
from pathlib import Path

from eval_pipeline.flow.session import Session
from eval_pipeline.models.run_config import read_run_config
from eval_pipeline.report.results import EvaluatedModel, read_qa_logs
from eval_pipeline.report.tracking import log_to_wandb
from verl_ext.console import warn
from verl_ext.metrics.wandb_sink import persistent_run_id


def track(session: Session, model: EvaluatedModel, directory: Path) -> None:
    """Log a checkpoint's figures; published again with further data sets, they go to the same W&B run.

    Args:
        session: of the place.
        model: what was found.
        directory: of its files.
    """
    run_dir = session.place.run_dir
    try:
        run_id = _run_id(session, model)
    except OSError as error:
        warn(f"the results of {model.label} are not logged to W&B, because the run's id cannot be saved: {error}")
        return
    run_config = read_run_config(run_dir)
    log_to_wandb(
        model,
        read_qa_logs(directory, model.datasets),
        project=run_config.project,
        experiment=run_config.experiment,
        directory=run_dir or directory,
        run_id=run_id,
    )


def _run_id(session: Session, model: EvaluatedModel) -> str:
    """The same for a checkpoint of a run whenever it is published; another for figures that are kept apart."""
    place = session.place
    if place.run_dir is not None and not place.one_model:
        return f"{persistent_run_id(place.run_dir)}-{model.label}"
    return hashlib.sha256(f"{place.root} {model.label} {model.weights}".encode()).hexdigest()[:16]
