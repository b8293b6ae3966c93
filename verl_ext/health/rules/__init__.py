"""Every rule, by what it is about."""

from __future__ import annotations

from collections.abc import Iterable

from verl_ext.health.rule import Rule
from verl_ext.health.rules.budget import BUDGET
from verl_ext.health.rules.gradient import GRADIENT
from verl_ext.health.rules.loss import LOSS
from verl_ext.health.rules.reward import REWARD
from verl_ext.health.rules.rollout import ROLLOUT
from verl_ext.health.rules.system import SYSTEM
from verl_ext.health.rules.validation import VALIDATION

RULES: tuple[Rule, ...] = (*LOSS, *VALIDATION, *GRADIENT, *REWARD, *ROLLOUT, *BUDGET, *SYSTEM)
BY_NAME = {each.name: each for each in RULES}


def watched_by(rules: Iterable[Rule]) -> frozenset[str]:
    """Names of the metrics that rules read."""
    return frozenset(name for each in rules for name in each.watches)


WATCHED = watched_by(RULES)
