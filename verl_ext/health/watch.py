"""Checks the rules inside the training loop, every few steps on rank 0; reports each change once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ext.files import parse_json
from verl_ext.health.config import HealthConfig
from verl_ext.health.context import RunContext
from verl_ext.health.history import effective_rows, read_history
from verl_ext.health.rule import EVAL_REWARD, LOSS, VAL_LOSS, Finding, HealthView, Level, Rule
from verl_ext.health.rules import RULES, load_rules
from verl_ext.metrics.jsonl import EVENTS_FILE, is_training_row
from verl_ext.metrics.run_record import RunRecord

CLEAR_CHECKS = 3
"""Consecutive clear checks after which a finding is gone, so that values near a threshold do not flicker."""
VALIDATED = frozenset({VAL_LOSS, EVAL_REWARD})
"""Metrics of validations; every row of a validation has one of them."""


class HealthMonitor:
    """Checks the rules of a run as its metrics arrive.

    Args:
        view: view of the run; its history is extended.
        every: steps between two checks; validations and non-finite losses are checked at once.
        stop_on: rules whose warning or alarm stops the run.
        reported: last level that earlier attempts reported, by rule; it is not reported again and stops nothing.

    Attributes:
        stop_rule: the first rule of `stop_on` that has found a problem; None if there is none.
    """

    def __init__(
        self,
        view: HealthView,
        every: int = 10,
        stop_on: Sequence[str] = (),
        reported: Mapping[str, Level] | None = None,
        rules: Sequence[Rule] = RULES,
    ) -> None:
        self._view, self._every = view, every
        self._stop_on, self._rules = frozenset(stop_on), rules
        self._active: dict[str, Level] = dict(reported or {})
        self._clear_checks: dict[str, int] = {}
        self.stop_rule: str | None = None

    @classmethod
    def for_run(
        cls,
        settings: HealthConfig,
        config: Mapping[str, Any],
        run_dir: Path,
        first_step: int,
        total_steps: int,
        steps_per_epoch: int,
    ) -> HealthMonitor:
        """Create the monitor of a run that resumes from `first_step`, with the metrics of earlier attempts.

        Args:
            config: the resolved configuration; `settings` is its section `health`.
        """
        run = RunRecord(run_dir).read()
        rules = load_rules(settings.rules, "health.rules")
        history, _ = read_history(run_dir, run["attempts"], until=first_step)
        context = RunContext.of(run_dir, run, config, total_steps, steps_per_epoch)
        view = HealthView(history, context, settings.limits)
        reported = reported_levels(run_dir / EVENTS_FILE, first_step, run["attempts"])
        return cls(view, settings.every, settings.stop_on, reported, rules)

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Add a row of metrics, and return changed findings if the rules are due."""
        self._view.history.add(step, metrics)
        if not self._is_due(step, metrics):
            return []
        before = dict(self._active)
        changes = [found for found in self.findings() if self._is_news(found)]
        risen = (each for each in changes if each.level > before.get(each.rule, Level.OK))  # falls are news, too
        stopping = (each.rule for each in risen if each.rule in self._stop_on and each.level >= Level.WARNING)
        self.stop_rule = self.stop_rule or next(stopping, None)
        return changes

    def findings(self) -> list[Finding]:
        """Return the current findings of the stage's rules; rules without enough data are missing."""
        found = (rule.run(self._view) for rule in self._rules)
        return [each for each in found if each is not None]

    def _is_due(self, step: int, metrics: Mapping[str, float]) -> bool:
        is_turn = is_training_row(metrics) and (step % self._every == 0 or step == self._view.context.total_steps)
        return is_turn or not VALIDATED.isdisjoint(metrics) or not math.isfinite(metrics.get(LOSS, 0.0))

    def _is_news(self, finding: Finding) -> bool:
        """Whether a finding is more serious than the active one of its rule, or has been less serious for a while."""
        active = self._active.get(finding.rule, Level.OK)
        clear = self._clear_checks.get(finding.rule, 0) + 1 if finding.level < active else 0
        is_news = finding.level > active or clear >= CLEAR_CHECKS
        self._clear_checks[finding.rule] = 0 if is_news else clear
        if is_news:
            self._active[finding.rule] = finding.level
        return is_news


def reported_levels(path: Path, step: int, attempts: Sequence[Mapping[str, Any]]) -> dict[str, Level]:
    """Return the last level of each rule in `events.jsonl`, up to a step, without steps that were discarded."""
    found: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            row = parse_json(line)
            if isinstance(row["name"], str) and row["attempt"] >= 0 and row["step"] <= step:
                found.append({**row, "level": Level[row["level"].upper()]})
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a crash can leave a torn line
    return {row["name"]: row["level"] for row in effective_rows(iter(found), attempts)}
