"""What a rule is, and the list that they enter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from verl_ext.health.config import HealthLimits
from verl_ext.health.facts import LANGUAGE, REWARDED, Facts
from verl_ext.health.findings import Finding, Seen
from verl_ext.health.history import History

Check = Callable[[History, Facts, HealthLimits], Seen | None]
EVERY_STAGE = LANGUAGE | REWARDED


@dataclass(frozen=True)
class Rule:
    """One thing that can go wrong.

    Attributes:
        name: as recipes and people know it.
        watches: metrics that it reads.
        stages: that it is for.
        advice: what to do when it complains, one sentence without a full stop.
        meaning: when it complains, one sentence.
        check: a pure function of the run's history; None where there is too little to tell.
    """

    name: str
    watches: tuple[str, ...]
    stages: frozenset[str]
    advice: str
    meaning: str
    check: Check

    def find(self, history: History, facts: Facts, limits: HealthLimits) -> Finding | None:
        """Check now; None where the rule is not for the stage, or has too little to tell."""
        seen = self.check(history, facts, limits) if facts.stage in self.stages else None
        if seen is None:
            return None
        return Finding(self.name, seen.level, seen.message, seen.advice or self.advice, history.step)


def rule(*watches: str, advice: str, into: list[Rule], stages: Iterable[str] = EVERY_STAGE) -> Callable[[Check], Check]:
    """Enter a check, under its function's name, into a list of rules; its docstring says when it complains."""

    def enter(check: Check) -> Check:
        meaning = " ".join((check.__doc__ or "").split())
        into.append(Rule(check.__name__, watches, frozenset(stages), advice, meaning, check))
        return check

    return enter
