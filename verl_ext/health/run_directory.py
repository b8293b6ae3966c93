"""Reads a live or finished run from its files: record, configuration, metrics, and whether it is alive."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.checkpoint.manifest import Manifest, complete_checkpoints
from verl_ext.errors import UserError, one_line
from verl_ext.health.config import HealthLimits
from verl_ext.health.context import RunContext, read_run_config
from verl_ext.health.history import MetricHistory, read_history
from verl_ext.health.rule import STEP_TIME, Finding, HealthView, Rule
from verl_ext.health.rules import RULES
from verl_ext.metrics.heartbeat import seconds_since_heartbeat
from verl_ext.metrics.jsonl import METRICS_FILE
from verl_ext.metrics.run_record import RUN_FILE, load_run, require_run_files, seconds_of
from verl_ext.processes import boot_id, is_alive, pid_namespace

EARLY_STEPS = 100
"""Steps after which the first checklist is due."""
KILLED = "killed"
"""Status of a run that did not record its end; `run.json` still says `running`."""
MAX_SILENT_STEPS, MAX_SILENCE_S = 10, 600.0
"""A run that logs nothing for more than this many step times and seconds is dead or hangs."""
PAUSES = ("time/val/step_s", "time/eval/step_s", "time/train/save_s", "time/checkpoint/write_s")
"""Metrics of work during which a run logs nothing."""


@dataclass(frozen=True)
class RunDirectory:
    """A run directory.

    Attributes:
        run: content of `run.json`.
        config: content of `config.yaml`.
        view: view of all steps, for the rules.
        early: view of the first `EARLY_STEPS` steps.
    """

    path: Path
    run: Mapping[str, Any]
    config: Mapping[str, Any]
    view: HealthView
    early: HealthView
    rules: Sequence[Rule] = RULES

    @classmethod
    def read(cls, path: Path, rules: Sequence[Rule] = RULES) -> RunDirectory:
        """Read a run directory; does not load rules that the run's recipe names.

        Raises:
            UserError: the path is not a run directory, or a file cannot be read.
        """
        require_run_files(path, METRICS_FILE, "config.yaml")
        run, config = load_run(path / RUN_FILE), read_run_config(path / "config.yaml")
        history, early = read_history(path, run["attempts"], snapshot_at=EARLY_STEPS)
        try:
            context = RunContext.of(path, run, config, run["total_steps"], history.steps_per_epoch)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise UserError(
                f"{path / 'config.yaml'} is not the configuration of a run ({one_line(error)}); restore it"
            ) from error
        limits = limits_of(config)
        return cls(path, run, config, HealthView(history, context, limits), HealthView(early, context, limits), rules)

    @property
    def stage(self) -> str:
        """The stage of the run."""
        return self.view.context.stage

    @property
    def history(self) -> MetricHistory:
        """The metrics of all steps."""
        return self.view.history

    @property
    def attempt(self) -> Mapping[str, Any]:
        """The last attempt of `run.json`; empty if there is none."""
        return last_attempt(self.run)

    @property
    def first_step(self) -> int:
        """The step from which the last attempt resumed; that attempt wrote `config.yaml`."""
        return self.attempt.get("first_step") or 0

    @cached_property
    def checkpoints(self) -> list[Manifest]:
        """The manifests of the complete checkpoints, the newest first."""
        return list(complete_checkpoints(self.path).values())

    def findings(self, early: bool = False) -> dict[str, Finding]:
        """Return the findings for all steps or the early ones, by rule; rules without enough data are missing."""
        found = (rule.run(self.early if early else self.view) for rule in self.rules)
        return {each.rule: each for each in found if each is not None}

    @property
    def status(self) -> str:
        """The status of `run.json`, or `killed`."""
        return KILLED if self.death() else self.run["status"]

    def death(self) -> str | None:
        """Why a run that has not recorded its end no longer runs; None if it may still run."""
        steps = self.history.series(STEP_TIME).recent(20)
        pauses = [float(each.max()) for name in PAUSES if len(each := self.history.series(name).recent())]
        allowed = max_silence_s(float(np.median(steps)) if len(steps) else 0.0, max(pauses, default=0.0))
        return why_killed(self.path, self.run, silence_s(self.run, self.history.time), allowed)


def last_attempt(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """The last attempt of a `run.json`; empty if there is none."""
    attempts: Sequence[Mapping[str, Any]] = run["attempts"]
    return attempts[-1] if attempts else {}


def silence_s(run: Mapping[str, Any], last_row: float) -> float:
    """Seconds since a run was last active; its last row was logged at `last_row` (seconds since 1970)."""
    return time.time() - max(last_row, seconds_of(last_attempt(run).get("start")) or 0.0)


def max_silence_s(step_s: float, pause_s: float) -> float:
    """Seconds for which a live run may log nothing.

    Args:
        step_s: usual duration of a step.
        pause_s: longest validation, evaluation or save so far.
    """
    return max(MAX_SILENCE_S, MAX_SILENT_STEPS * step_s, 2 * pause_s)


def relies_on_heartbeat(run: Mapping[str, Any]) -> bool:
    """Whether the launcher's heartbeat alone tells if a run is alive.

    Before the ranks start, and on another machine, no process of the run can be seen.
    """
    if run["status"] == "waiting":
        return bool((run.get("launch") or {}).get("heartbeat_s"))
    return run["status"] == "running" and not _is_here(run) and bool(last_attempt(run).get("heartbeat_s"))


def why_killed(path: Path, run: Mapping[str, Any], silent_s: float, allowed_s: float) -> str | None:
    """Why a run with the status `running` or `waiting` is dead; None for other statuses, or if it may be alive.

    Args:
        path: run directory.
        run: content of `run.json`.
        silent_s: see `silence_s`.
        allowed_s: see `max_silence_s`.
    """
    if relies_on_heartbeat(run):  # even if the ranks hang
        beat_s = seconds_since_heartbeat(path)
        return None if beat_s is None else f"no heartbeat from its launcher for {beat_s:.0f} s"
    if run["status"] != "running":
        return None
    attempt = last_attempt(run)
    if _is_here(run):
        # a live process may be slow: a first step can take longer than any limit
        is_running = is_alive(attempt["pid"], attempt.get("pid_start_ticks"))
        return None if is_running else f"its process {attempt['pid']} no longer exists"
    return f"it has logged nothing for {silent_s:.0f} s" if silent_s > allowed_s else None


def _is_here(run: Mapping[str, Any]) -> bool:
    """Whether this process can see the process of a run's last attempt."""
    attempt = last_attempt(run)
    return (
        attempt.get("host") == socket.gethostname()
        and attempt.get("boot_id", boot_id()) == boot_id()  # earlier versions did not record it
        and attempt.get("pid_namespace") == pid_namespace()
        and attempt.get("pid") is not None
    )


def limits_of(config: Mapping[str, Any]) -> HealthLimits:
    """Return the thresholds of a recipe; the defaults for runs of releases without thresholds.

    Raises:
        UserError: the recipe has a threshold that does not exist.
    """
    wanted = (config.get("health") or {}).get("limits") or {}
    try:
        return HealthLimits(**wanted)
    except TypeError as error:
        raise UserError(
            f"health.limits in config.yaml is from another version ({error}); correct or remove it there"
        ) from error
