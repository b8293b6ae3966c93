"""The health rules of one attempt, on rank 0."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from verl_ext.checkpoint.manifest import committed_steps
from verl_ext.config.schema import as_dict
from verl_ext.files import parse_json
from verl_ext.health.facts import Facts
from verl_ext.health.findings import Level
from verl_ext.health.own_rules import all_rules
from verl_ext.health.replay import replay
from verl_ext.health.rules import watched_by
from verl_ext.health.watch import HealthWatch
from verl_ext.metrics.jsonl import EVENTS_FILE
from verl_ext.metrics.run_record import RunRecord
from verl_ext.trainer.stages import RunConfig


def watch_of(config: RunConfig, first_step: int, total_steps: int, steps_per_epoch: int) -> HealthWatch | None:
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
    run = RunRecord(run_dir).read()
    rules = all_rules(wanted.rules, "health.rules")
    history, _ = replay(run_dir, run["attempts"], first_step, watched_by(rules))
    checkpoints = partial(committed_steps, run_dir)
    facts = Facts.of(as_dict(config), total_steps, steps_per_epoch, checkpoints, run["untrained_loss"])
    told = told_before(run_dir / EVENTS_FILE, first_step)
    return HealthWatch(history, facts, wanted.limits, wanted.every, list(wanted.stop_on), told, rules)


def told_before(path: Path, step: int) -> dict[str, Level]:
    """By rule what `events.jsonl` says of it last, up to a step; empty where there is none."""
    found: dict[str, Level] = {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            row = parse_json(line)
            if row["step"] <= step:
                found[row["name"]] = Level[row["level"].upper()]
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a line that a crash left torn
    return found
