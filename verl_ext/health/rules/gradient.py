"""Rules on the gradient and the learning rate."""

from __future__ import annotations

import numpy as np

from verl_ext.health.config import HealthLimits
from verl_ext.health.facts import Facts
from verl_ext.health.findings import Seen, alarm, notice, ok, warning
from verl_ext.health.history import History
from verl_ext.health.rule import Rule, rule

GRADIENT: list[Rule] = []
NORM, LR, SKIPPED = "train/grad_norm", "train/lr(1e-3)", "train/skipped_steps"
CHECKED_RATES = 10
"""Steps whose learning rate is compared with the schedule."""


@rule(NORM, advice="if the loss is affected too, lower optim.lr or optim.clip_grad", into=GRADIENT)
def grad_norm_range(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The usual gradient norm is outside the range that is common for such runs."""
    recent = history.series(NORM).recent(limits.window)
    if len(recent) < limits.window:
        return None
    told = f"the gradient norm is about {np.median(recent):.3g}"
    if np.median(recent) < limits.grad_norm_min:
        advice = "if the loss does not fall, raise optim.lr and check that the parameters are trained"
        return notice(f"{told}, below {limits.grad_norm_min:g}", advice)
    return notice(f"{told}, above {limits.grad_norm_max:g}") if np.median(recent) > limits.grad_norm_max else ok(told)


@rule(NORM, advice="lower optim.lr and set optim.clip_grad", into=GRADIENT)
def grad_norm_exploding(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The gradient norm is above 100 for half of the recent steps."""
    lost = history.num_nonfinite(NORM, limits.window)
    recent = history.series(NORM).recent(limits.window - lost)  # the series has finite values only
    if len(recent) + lost < limits.window:
        return None
    large = lost + int((recent > limits.grad_norm_alarm).sum())
    share = large / limits.window
    told = f"{share:.0%} of the last {limits.window} gradient norms are above {limits.grad_norm_alarm:g} or not finite"
    return alarm(told) if share >= 0.5 else warning(told) if share >= 0.2 else ok(told)


@rule(NORM, advice="check that the loss has tokens and that parameters are trained", into=GRADIENT)
def grad_norm_vanishing(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The gradient norm is practically 0."""
    recent = history.series(NORM).recent(limits.window)
    if len(recent) < limits.window:
        return None
    told = f"the gradient norm is about {np.median(recent):.3g}"
    return warning(told) if np.median(recent) < limits.grad_norm_vanished else ok(told)


@rule(
    LR,
    SKIPPED,
    advice="compare the optim section of config.yaml with what the run was meant to do",
    into=GRADIENT,
)
def lr_schedule(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The learning rate is not that of the schedule."""
    points = history.series(LR).points(CHECKED_RATES)
    if facts.schedule is None or len(points) < 3:
        return None
    skipped = round(history.series(SKIPPED).last_value) if history.series(SKIPPED).num_points else 0
    allowed = limits.lr_tolerance * facts.schedule.peak
    wrong = [
        (step, value)
        for step, value in points
        # a step that was skipped among these moves the schedule by one, so either count is right for them
        if min(abs(value / 1e3 - facts.schedule.at(step, each)) for each in range(skipped + 1)) > allowed
    ]
    if len(wrong) < 3:
        return ok("the learning rate follows its schedule")
    step, value = wrong[-1]
    return warning(
        f"the learning rate is {value / 1e3:.3g} at step {step}, and its schedule has {facts.schedule.at(step):.3g}"
    )
