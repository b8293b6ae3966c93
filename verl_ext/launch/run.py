"""One run from waiting to its end: what run.json says, what the user is told, and the exit code."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from omegaconf import DictConfig

from verl_ext.checkpoint.layout import read_tracker, what_is_wrong
from verl_ext.config.digest import config_digest
from verl_ext.errors import UserError
from verl_ext.launch.configure import checkpoint_that_suits
from verl_ext.launch.lock import exclusive
from verl_ext.launch.ranks import Failure, StopRequest, run_ranks
from verl_ext.launch.summary import print_summary
from verl_ext.metrics.run_record import RunRecord


def run_to_the_end(config: DictConfig) -> int:
    """Train unless the same run is already finished; returns the exit code of the command."""
    run_dir = Path(config.trainer.default_local_dir)
    record = RunRecord(run_dir)
    if is_finished(config, record):
        print(
            f"This run is finished: {run_dir}. Prolong it with trainer.total_epochs, or rename trainer.experiment_name."
        )
        print_summary(config)
        return 0
    checkpoint_that_suits(config)
    if node_rank() > 0:
        return follow(config)
    with exclusive(run_dir):
        return lead(config, record)


def follow(config: DictConfig) -> int:
    """Run the ranks of a node other than the first, which keeps the record and tells the user."""
    try:
        failure = run_ranks(config)
    except StopRequest as stop:
        return 128 + stop.signal
    if failure is not None and failure.is_user_error:
        raise UserError(failure.message)
    return 0 if failure is None else 1


def lead(config: DictConfig, record: RunRecord) -> int:
    """Run the ranks of the first node, with run.json kept and the user told."""
    mark_waiting(config, record)
    try:
        failure = run_ranks(config)
    except StopRequest as stop:
        record.end_if_running("stopped", f"stopped by {stop.signal.name}")
        print(f"Stopped by {stop.signal.name}; the same command goes on from the last checkpoint.", flush=True)
        return 128 + stop.signal
    if failure is not None:
        return report(failure, record)
    print_summary(config)
    return 0


def node_rank() -> int:
    """NODE_RANK, 0 on a single machine; only node 0 keeps run.json."""
    return int(os.environ.get("NODE_RANK", "0"))


def mark_waiting(config: DictConfig, record: RunRecord) -> None:
    """Enter the run into run.json before its ranks start."""
    record.mark_waiting(
        project=config.trainer.project_name,
        experiment=config.trainer.experiment_name,
        stage=config.stage,
        recipe=config.recipe,
        config_digest=config_digest(config),
    )


def is_finished(config: DictConfig, record: RunRecord) -> bool:
    """Whether run.json says that exactly this configuration ran to its end."""
    try:
        run = record.read()
    except UserError:
        return False  # start_attempt puts a damaged record aside and says so
    trainer = config.trainer
    asked = trainer.resume_mode == "auto" and trainer.resume_from_path is None
    same = run["status"] == "finished" and run["config_digest"] == config_digest(config)
    tracked, _ = read_tracker(Path(trainer.default_local_dir))
    return asked and same and tracked is not None and what_is_wrong(tracked) is None


def report(failure: Failure, record: RunRecord) -> int:
    """Tell the user once why the ranks ended, and return the exit code."""
    record.end_if_running("failed", failure.message)
    if failure.is_user_error:
        raise UserError(failure.message)
    print(f"error: {failure.message}; the same command goes on from the last checkpoint", file=sys.stderr)
    return 1
