"""A run as its files tell, live or finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from verl_ext.checkpoint.manifest import committed_steps
from verl_ext.errors import UserError, one_line
from verl_ext.files import yaml_text
from verl_ext.health.config import HealthLimits
from verl_ext.health.facts import Facts
from verl_ext.health.findings import Finding
from verl_ext.health.history import History
from verl_ext.health.replay import replay
from verl_ext.health.rule import Rule
from verl_ext.health.rules import RULES, watched_by
from verl_ext.metrics.jsonl import METRICS_FILE
from verl_ext.metrics.run_record import RUN_FILE, load_run

EARLY_STEPS = 100
"""After how many steps the first checklist is gone through."""
_LOOKED_AT = {"save_freq", "device", "logger"}
"""Keys of the section `trainer` that the checklists read."""


@dataclass(frozen=True)
class RunFiles:
    """One run.

    Attributes:
        directory: of the run.
        run: the content of `run.json`.
        config: the content of `config.yaml`.
        history: all steps.
        early: the first `EARLY_STEPS` of them.
        facts: for the rules.
        limits: thresholds of the recipe.
        rules: that are checked.
    """

    directory: Path
    run: Mapping[str, Any]
    config: Mapping[str, Any]
    history: History
    early: History
    facts: Facts
    limits: HealthLimits
    rules: Sequence[Rule] = RULES

    @classmethod
    def read(cls, directory: Path, rules: Sequence[Rule] = RULES) -> RunFiles:
        """Read a run directory.

        Args:
            directory: of the run.
            rules: to check; those that the run's recipe names are not loaded by themselves.

        Raises:
            UserError: it is none, or a file cannot be read.
        """
        for name in (RUN_FILE, METRICS_FILE, "config.yaml"):
            if not (directory / name).is_file():
                raise UserError(
                    f"{directory} has no {name}, so it is no run that has begun; give the directory of a run, such as "
                    "checkpoints/<project>/<experiment>"
                )
        run, config = load_run(directory / RUN_FILE), read_config(directory / "config.yaml")
        names = watched_by(rules)
        history, steps_per_epoch = replay(directory, run["attempts"], names=names)
        early, _ = replay(directory, run["attempts"], until=EARLY_STEPS, names=names)
        checkpoints = partial(committed_steps, directory)
        try:
            facts = Facts.of(config, run["total_steps"], steps_per_epoch, checkpoints, run["untrained_loss"])
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise UserError(
                f"{directory / 'config.yaml'} is not the configuration of a run ({one_line(error)}); restore it"
            ) from error
        return cls(directory, run, config, history, early, facts, limits_of(config), rules)

    def findings(self, early: bool = False) -> dict[str, Finding]:
        """What each rule sees, by its name, those left out that have too little to tell."""
        history = self.early if early else self.history
        found = (each.find(history, self.facts, self.limits) for each in self.rules)
        return {each.rule: each for each in found if each is not None}


def read_config(path: Path) -> dict[str, Any]:
    """A run's `config.yaml`.

    Raises:
        UserError: it is no configuration of a run.
    """
    try:
        config = yaml.safe_load(yaml_text(path))
    except RecursionError:
        raise UserError(f"{path} cannot be read (it is nested too deeply); restore it") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())}); restore it") from error
    sections = ("trainer", "optim", "data")
    is_of_a_run = isinstance(config, dict) and all(isinstance(config.get(name), dict) for name in sections)
    if not is_of_a_run or not isinstance(config.get("stage"), str) or not _LOOKED_AT <= config["trainer"].keys():
        raise UserError(f"{path} is not the configuration of a run; the trainer writes it when a run begins")
    return config


def limits_of(config: Mapping[str, Any]) -> HealthLimits:
    """The thresholds of a recipe; the defaults for a run that was made before there were any.

    Raises:
        UserError: a threshold that no rule has.
    """
    wanted = (config.get("health") or {}).get("limits") or {}
    try:
        return HealthLimits(**wanted)
    except TypeError as error:
        raise UserError(
            f"health.limits of config.yaml is of another version ({error}); correct or remove it there"
        ) from error
