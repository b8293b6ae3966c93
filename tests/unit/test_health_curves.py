"""A labelled set of runs: every rule that must complain does, and no other."""

from __future__ import annotations

import pytest

from tests.helpers.health_curves import CURVES, PEAK, SAMPLES, Curve
from verl_ext.health.config import HealthLimits
from verl_ext.health.facts import Facts
from verl_ext.health.findings import Level
from verl_ext.health.history import History
from verl_ext.health.rules import BY_NAME, RULES
from verl_ext.health.schedule import Schedule

SEEDS = range(5)


def complaints(curve: Curve, seed: int) -> dict[str, str]:
    history = History()
    for step, metrics in (rows := curve.rows(seed)):
        history.add(step, metrics)
    total = rows[-1][0]
    schedule = Schedule(PEAK, "constant", 0, total)
    facts = Facts(curve.stage, total, schedule, 512, 1024, SAMPLES, untrained_loss=curve.untrained_loss)
    if curve.stage == "budget":
        facts = Facts(curve.stage, total)
    found = (each.find(history, facts, HealthLimits(**curve.limits)) for each in RULES)
    return {each.rule: each.message for each in found if each is not None and each.level >= Level.WARNING}


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name.replace(" ", "_"))
def test_no_false_alarm_and_no_miss(curve: Curve) -> None:
    for seed in SEEDS:
        found = complaints(curve, seed)
        assert set(found) == curve.complaints, found


def test_every_rule_that_warns_has_a_labelled_run() -> None:
    labelled = frozenset().union(*(curve.complaints for curve in CURVES))
    only_notices = {"grad_norm_range", "prompts_at_limit", "completions_at_limit"}
    assert labelled == BY_NAME.keys() - only_notices
