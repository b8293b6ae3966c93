"""The health rules of one attempt, on rank 0."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_ext.checkpoint.layout import complete_steps
from verl_ext.health.facts import Facts
from verl_ext.health.limits import Limits
from verl_ext.health.replay import replay
from verl_ext.health.watch import HealthWatch
from verl_ext.metrics.run_record import RunRecord


def watch_of(config: DictConfig, first_step: int, total_steps: int, steps_per_epoch: int) -> HealthWatch | None:
    """The rules with what earlier attempts recorded; None where the recipe wants none.

    Args:
        config: the resolved configuration.
        first_step: that the attempt begins from.
        total_steps: of the run.
        steps_per_epoch: optimizer steps in a pass over the data.
    """
    wanted, run_dir = config.health, Path(config.trainer.default_local_dir)
    if not wanted.enabled:
        return None
    history, _ = replay(run_dir, RunRecord(run_dir).read()["attempts"], until=first_step)
    content = OmegaConf.to_container(config, resolve=True)
    facts = Facts.of(content, total_steps, steps_per_epoch, lambda: complete_steps(run_dir))
    return HealthWatch(history, facts, Limits(**wanted.limits), wanted.every, list(wanted.stop_on))
