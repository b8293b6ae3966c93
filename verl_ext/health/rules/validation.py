"""Rules on the validation loss."""

from __future__ import annotations

import numpy as np

from verl_ext.health.config import HealthLimits
from verl_ext.health.facts import LANGUAGE, Facts
from verl_ext.health.findings import Seen, alarm, notice, ok, warning
from verl_ext.health.history import History
from verl_ext.health.rule import Rule, rule
from verl_ext.health.rules.loss import TRAIN

VALIDATION: list[Rule] = []
VAL = "val/loss"
RISES = 3
"""Validations in a row, each above the one before."""
AFTER_BEST = 2
"""Validations above the best that are overfitting and no accident."""


@rule(VAL, advice="look at the validation data, and at the model's number type", into=VALIDATION, stages=LANGUAGE)
def val_loss_not_finite(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The last validation loss is NaN or infinite."""
    if history.num_nonfinite(VAL, 1):
        return alarm("the last val/loss was not finite")
    return ok("val/loss is finite") if history.series(VAL).num_points else None


@rule(VAL, TRAIN, advice="stop and take the best checkpoint", into=VALIDATION, stages=LANGUAGE)
def overfitting(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The validation loss rises from its best while the training loss falls; it names the checkpoint to take."""
    points = history.series(VAL).points()
    if len(points) < 2:
        return None
    place = min(range(len(points)), key=lambda each: points[each][1])
    best_step, best = points[place]
    later = [value for _, value in points[place + 1 :]]
    told = f"val/loss was {best:.4g} at step {best_step} and is {points[-1][1]:.4g} at step {points[-1][0]}"
    above = _trailing(later, _risen(best, limits))
    if not above or not _trains_on(history, best_step):
        return ok(told)
    if above < AFTER_BEST or later[-1] < later[-above]:
        return notice(told)
    return warning(f"{told}, while train/loss falls{_to_take(best_step, facts)}")


@rule(VAL, advice="stop when it goes on rising, and take the best checkpoint", into=VALIDATION, stages=LANGUAGE)
def val_loss_rising(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The validation loss rose several times in a row."""
    values = history.series(VAL).recent(RISES + 1)
    if len(values) <= RISES:
        return None
    told = f"the last values of val/loss are {', '.join(f'{value:.4g}' for value in values)}"
    risen = bool((np.diff(values) > 0).all()) and values[-1] > _risen(values[0], limits)
    return warning(told) if risen else ok(told)


def _risen(value: float, limits: HealthLimits) -> float:
    """What is above a validation loss by more than chance."""
    return max(value * (1 + limits.val_margin), value + limits.val_min_change)


def _trailing(values: list[float], bound: float) -> int:
    """How many values at the end are above a bound."""
    count = 0
    while count < len(values) and values[-1 - count] > bound:
        count += 1
    return count


def _trains_on(history: History, step: int) -> bool:
    """Whether the training loss since a step is below what it was about that step."""
    points = history.series(TRAIN).points()
    after = [value for each, value in points if each > step]
    before = [value for each, value in points if each <= step]
    if not before:  # the step is further back than what is kept
        before = list(history.series(TRAIN).buckets)
    return bool(after) and bool(before) and np.median(after[-20:]) < np.median(before[-20:])


def _to_take(step: int, facts: Facts) -> str:
    """The checkpoint nearest to the best validation, for the message."""
    kept = facts.checkpoints()
    if not kept:
        return ""
    nearest = min(kept, key=lambda each: (abs(each - step), each))
    return f"; the checkpoint to take is global_step_{nearest}"
