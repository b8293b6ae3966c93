"""On labeled synthetic runs, exactly the expected health rules report a finding."""

from __future__ import annotations

import pytest

from tests.helpers.health_curves import CURVES, Curve, history_of, view_of
from verl_ext.health.config import HealthLimits
from verl_ext.health.context import RunContext
from verl_ext.health.rule import Finding, HealthView, Level
from verl_ext.health.rules import RULES

SEEDS = range(5)


def findings_of(curve: Curve, seed: int) -> list[Finding]:
    view = view_of(curve, seed)
    return [found for rule in RULES if (found := rule.run(view)) is not None]


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name.replace(" ", "_"))
def test_rules_have_no_false_alarm_and_no_miss(curve: Curve) -> None:
    for seed in SEEDS:
        found = findings_of(curve, seed)
        assert {each.rule for each in found if each.level >= Level.WARNING} == curve.complaints, found
        assert {each.rule for each in found if each.level == Level.NOTICE} >= curve.notices, found
        assert not [each for each in found if "the rule itself failed" in each.message]


def test_free_space_has_suitable_unit() -> None:
    rows = [(step, {"system/disk_free_gib": (6.5 - step) / 1024}) for step in range(1, 5)]
    [rule] = [rule for rule in RULES if rule.name == "disk_filling"]
    found = rule.run(HealthView(history_of(rows), RunContext("sft"), HealthLimits()))
    assert found is not None and found.message == "2.5 MiB are free, and each save takes 1.0 MiB more"


def test_every_rule_has_labeled_run() -> None:
    labeled = frozenset().union(*(curve.complaints | curve.notices for curve in CURVES))
    only_notices = {"grad_norm_range", "prompts_at_limit", "completions_at_limit"}
    assert labeled == {rule.name for rule in RULES} - only_notices
