"""Rules on a budget controller."""

from __future__ import annotations

from verl_ext.health.config import HealthLimits
from verl_ext.health.facts import Facts
from verl_ext.health.findings import Seen, alarm, notice, ok, warning
from verl_ext.health.history import History
from verl_ext.health.rule import Rule, rule
from verl_ext.health.trends import falls

BUDGET: list[Rule] = []
VIOLATION, LATENCY, BUDGETS = "train/budget_violation_mean", "train/latency_ms_mean", "train/budget_ms_mean"
ACCURACY = "train/accuracy_mean"
LAST_EPOCHS = 3
"""Epochs that are the present state."""


@rule(
    VIOLATION,
    advice="raise reward.budget_violation, or begin the budgets higher",
    into=BUDGET,
    stages={"budget"},
)
def violation_high(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """More than half of the configurations have been late for many epochs; a notice above 5 % after some."""
    rates = history.epochs(VIOLATION)
    if len(rates) < LAST_EPOCHS:
        return None
    told = f"{rates[-1]:.1%} of the last epoch's configurations were over budget"
    stuck = rates[-limits.stuck_epochs :]
    if len(stuck) == limits.stuck_epochs and stuck.min() > limits.violation_alarm:
        return alarm(f"{told}, and more than {limits.violation_alarm:.0%} for {limits.stuck_epochs} epochs")
    late = len(rates) >= limits.trend_epochs and rates[-LAST_EPOCHS:].min() > limits.violation_goal
    return notice(told) if late else ok(told)


@rule(
    LATENCY,
    BUDGETS,
    advice="compare reward.budget_violation and latency_penalty with what accuracy gains",
    into=BUDGET,
    stages={"budget"},
)
def latency_off_budget(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The mean latency is above the mean budget, or far below it."""
    latencies, budgets = (history.epochs(name)[-LAST_EPOCHS:] for name in (LATENCY, BUDGETS))
    if len(latencies) < LAST_EPOCHS or len(budgets) < LAST_EPOCHS:
        return None
    share = float(latencies.mean() / budgets.mean())
    told = f"the latency is {latencies.mean():.1f} ms, {share:.0%} of the budget"
    return warning(told) if share > 1 else notice(told) if share < limits.latency_share_min else ok(told)


@rule(
    ACCURACY,
    advice="weigh the accuracy more, or look at what the controller switches off",
    into=BUDGET,
    stages={"budget"},
)
def accuracy_falling(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The accuracy of an epoch has fallen over many epochs."""
    means = history.epochs(ACCURACY)[-limits.trend_epochs - 1 :]
    if len(means) <= limits.trend_epochs:
        return None
    told = f"accuracy went from {means[0]:.3g} to {means[-1]:.3g} over {limits.trend_epochs} epochs"
    return warning(told) if falls(means) else ok(told)
