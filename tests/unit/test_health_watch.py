"""The rules inside the loop: what is news, what stops a run, and what is refused."""

from __future__ import annotations

import math

import pytest

from verl_ext.errors import UserError
from verl_ext.health.config import HealthLimits
from verl_ext.health.facts import Facts
from verl_ext.health.findings import Level
from verl_ext.health.history import History
from verl_ext.health.rules import BY_NAME
from verl_ext.health.watch import CALM_CHECKS, HealthWatch
from verl_ext.launch.preflight import check_health
from verl_ext.trainer.stages import load_config


def watch(
    *stop_on: str, history: History | None = None, every: int = 10, told: dict[str, Level] | None = None
) -> HealthWatch:
    return HealthWatch(history or History(), Facts("sft", 1000), HealthLimits(), every, stop_on, told)


def feed(watched: HealthWatch, steps: range, **metrics: float) -> list[tuple[int, str, Level]]:
    named = {f"train/{name}": value for name, value in metrics.items()}
    return [(step, each.rule, each.level) for step in steps for each in watched.note(step, named)]


def test_a_finding_is_told_once_and_again_when_it_gets_worse() -> None:
    watched = watch()
    assert feed(watched, range(1, 41), loss=2.0, grad_norm=1.0) == []
    told = feed(watched, range(41, 51), loss=2.0, grad_norm=300.0)
    assert told == [(50, "grad_norm_range", Level.NOTICE), (50, "grad_norm_exploding", Level.ALARM)]
    told = feed(watched, range(51, 101), loss=2.0, grad_norm=300.0)
    assert told == [(100, "loss_not_falling", Level.WARNING)]


@pytest.mark.parametrize(("norm", "says"), [(1e-3, "raise optim.lr"), (60.0, "lower optim.lr")])
def test_a_gradient_norm_out_of_range_gets_advice_by_its_direction(norm: float, says: str) -> None:
    history = History()
    for step in range(1, 101):
        history.add(step, {"train/grad_norm": norm})
    found = BY_NAME["grad_norm_range"].find(history, Facts("sft", 1000), HealthLimits())
    assert found is not None and found.level == Level.NOTICE and says in found.sentence


@pytest.mark.parametrize(
    ("norms", "level", "share"),
    [
        ([300.0] * 8 + [1.0] * 8 + [math.inf] * 4, Level.ALARM, "60%"),
        ([math.nan] * 4 + [300.0] * 6 + [1.0] * 10, Level.ALARM, "50%"),
        ([300.0] * 9 + [1.0] * 16 + [math.inf] * 4, Level.WARNING, "20%"),
        ([1.0] * 30 + [math.inf] * 3, Level.OK, "15%"),
        ([1.0] * 5 + [math.inf] * 20, Level.ALARM, "100%"),
    ],
)
def test_every_large_gradient_norm_of_the_window_counts(norms: list[float], level: Level, share: str) -> None:
    history = History()
    for step, norm in enumerate(norms, start=1):
        history.add(step, {"train/grad_norm": norm})
    found = BY_NAME["grad_norm_exploding"].find(history, Facts("sft", 1000), HealthLimits())
    assert found is not None and found.level == level and found.message.startswith(share)


def test_a_finding_is_gone_after_several_calm_checks() -> None:
    watched = watch()
    feed(watched, range(1, 41), loss=2.0, grad_norm=1e-4)
    told = feed(watched, range(41, 101), loss=2.0, grad_norm=1.0)
    gone = {rule: step for step, rule, level in told if level == Level.OK}
    # the median of 20 norms is back to normal at step 60, or at 50 where half of them are
    assert gone["grad_norm_vanishing"] in (50 + 10 * (CALM_CHECKS - 1), 60 + 10 * (CALM_CHECKS - 1))


def test_a_loss_that_is_no_number_is_told_at_once() -> None:
    watched = watch()
    feed(watched, range(1, 13), loss=2.0)
    told = feed(watched, range(13, 17), loss=math.nan)
    assert told == [(13, "loss_not_finite", Level.WARNING), (15, "loss_not_finite", Level.ALARM)]


def test_only_rules_that_are_named_stop_a_run_and_a_notice_does_not() -> None:
    watched = watch("grad_norm_range", "loss_not_finite")
    feed(watched, range(1, 41), loss=2.0, grad_norm=300.0)
    assert watched.stop_rule is None
    feed(watched, range(41, 42), loss=math.inf)
    assert watched.stop_rule == "loss_not_finite"


@pytest.mark.parametrize("was_told", [True, False])
def test_what_was_told_before_neither_tells_nor_stops_again(was_told: bool) -> None:
    history = History()
    for step in range(1, 37):  # the run was stopped between two checks
        history.add(step, {"train/loss": 2.0, "train/grad_norm": 300.0})
    told = {"grad_norm_exploding": Level.ALARM, "grad_norm_range": Level.NOTICE} if was_told else {}
    watched = watch("grad_norm_exploding", history=history, told=told)
    found = [rule for _, rule, _ in feed(watched, range(37, 61), loss=2.0, grad_norm=300.0)]
    assert found == ([] if was_told else ["grad_norm_range", "grad_norm_exploding"])
    assert watched.stop_rule == (None if was_told else "grad_norm_exploding")


def test_a_validation_is_checked_when_it_comes() -> None:
    watched = watch(every=1000)
    for step, loss, val in ((500, 1.2, 1.5), (1000, 0.8, 1.3), (1500, 0.5, 1.4), (2000, 0.3, 1.6)):
        for each in range(step - 499, step + 1):
            watched.note(each, {"train/loss": loss + (step - each) / 2000})
        told = watched.note(step, {"val/loss": val})
    [found] = [each for each in told if each.rule == "overfitting"]
    assert found.level == Level.WARNING and "1.3 at step 1000" in found.message


def test_overfitting_names_the_checkpoint_to_take() -> None:
    history = History()
    for step in range(1, 41):
        history.add(step, {"train/loss": 2 - step / 50})
        if step % 10 == 0:
            history.add(step, {"val/loss": {10: 1.2, 20: 1.0, 30: 1.2, 40: 1.4}[step]})
    facts = Facts("sft", 100, checkpoints=lambda: [15, 30, 40])
    found = BY_NAME["overfitting"].find(history, facts, HealthLimits())
    assert found.level == Level.WARNING and found.message.endswith("the checkpoint to take is global_step_15")


def test_a_threshold_is_set_by_its_name() -> None:
    config = load_config("sft", ["health.limits.grad_norm_alarm=7"])
    assert config.health.limits.grad_norm_alarm == 7.0
    with pytest.raises(UserError, match="grad_norm_alarmm"):
        load_config("sft", ["health.limits.grad_norm_alarmm=7"])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("health.stop_on=[overfiting]", "take overfitting"),
        ("health.stop_on=[violation_high]", "no rule of this stage"),
        ("health.every=0", "whole number of at least 1"),
        ("health.limits.window=300", "from 3 to 256"),
        ("health.limits.grad_norm_alarm=-1", "above 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(override: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_health(load_config("sft", [override]))
    check_health(load_config("sft", ["health.stop_on=[overfitting, loss_not_finite]"]))


def test_stopping_needs_the_rules() -> None:
    with pytest.raises(UserError, match="health.enabled"):
        check_health(load_config("sft", ["health.stop_on=[overfitting]", "health.enabled=false"]))
