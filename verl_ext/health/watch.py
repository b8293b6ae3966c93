"""The rules inside the loop: checked every few steps on rank 0, each change told once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_ext.health.config import HealthLimits
from verl_ext.health.facts import Facts
from verl_ext.health.findings import Finding, Level
from verl_ext.health.history import History
from verl_ext.health.rule import Rule
from verl_ext.health.rules import RULES

CALM_CHECKS = 3
"""Checks in a row without it before a finding counts as gone; a rule at its threshold would be told again and again."""


VALIDATED = frozenset({"val/loss", "eval/reward_total_mean"})
"""One of them is in every row of a validation."""


class HealthWatch:
    """Follows a run.

    Args:
        history: of the steps before this attempt.
        facts: of the run.
        limits: thresholds.
        every: steps between two checks; validations and losses that are not finite are checked at once.
        stop_on: rules that stop the run when they come to a warning or an alarm.
        told: what earlier attempts have told last, by rule; it is neither told nor stopped for again.
        rules: that are checked, those of other stages left out.
    """

    def __init__(
        self,
        history: History,
        facts: Facts,
        limits: HealthLimits,
        every: int = 10,
        stop_on: Sequence[str] = (),
        told: Mapping[str, Level] | None = None,
        rules: Sequence[Rule] = RULES,
    ) -> None:
        self._history, self._facts, self._limits, self._every = history, facts, limits, every
        self._stop_on = frozenset(stop_on)
        self._rules = [each for each in rules if facts.stage in each.stages]
        self._standing: dict[str, Level] = dict(told or {})
        self._calm: dict[str, int] = {}
        self.stop_rule: str | None = None

    def note(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Take a row of metrics; gives what has changed, where the rules were checked."""
        self._history.add(step, metrics)
        is_due = "train/loss" in metrics and (step % self._every == 0 or step == self._facts.total_steps)
        if not (is_due or VALIDATED & metrics.keys() or self._history.nonfinite_streak):
            return []
        changes = [each for each in self.findings() if self._is_news(each)]
        stopping = [each.rule for each in changes if each.rule in self._stop_on and each.level >= Level.WARNING]
        self.stop_rule = self.stop_rule or next(iter(stopping), None)
        return changes

    def findings(self) -> list[Finding]:
        """What every rule of the stage sees now, those left out that have too little to tell."""
        found = (each.find(self._history, self._facts, self._limits) for each in self._rules)
        return [each for each in found if each is not None]

    def _is_news(self, finding: Finding) -> bool:
        """Whether a finding is graver than what stands, or has calmed down for good; it stands from then on."""
        former = self._standing.get(finding.rule, Level.OK)
        self._calm[finding.rule] = self._calm.get(finding.rule, 0) + 1 if finding.level < former else 0
        if finding.level <= former and self._calm[finding.rule] < CALM_CHECKS:
            return False
        self._standing[finding.rule], self._calm[finding.rule] = finding.level, 0
        return True
