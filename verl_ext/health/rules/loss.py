"""Rules on the training loss."""

from __future__ import annotations

import numpy as np

from verl_ext.health.config import HealthLimits
from verl_ext.health.facts import LANGUAGE, REWARDED, Facts
from verl_ext.health.findings import Seen, alarm, ok, warning
from verl_ext.health.history import History
from verl_ext.health.rule import Rule, rule
from verl_ext.health.trends import noise_of, rises, trend_of

LOSS: list[Rule] = []
TRAIN = "train/loss"
JITTER_STEPS = 100
"""Steps over which a loss's spread is measured."""
NOISES = 4.0
"""Standard deviations that are no noise any more."""
FIRST_LOSSES = 5
"""Steps whose mean is the initial loss."""
GUESSING_MARGIN = 1.1
"""Times the loss of random guessing that untrained weights may have: their predictions are not quite uniform."""


@rule(TRAIN, advice="lower optim.lr, or look at the batches of those steps", into=LOSS)
def loss_not_finite(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The loss is NaN or infinite; an alarm when several steps in a row are."""
    streak = history.nonfinite_streak
    if not streak:
        return ok("the loss is finite") if history.series(TRAIN).num_points else None
    message = f"the loss was not finite for the last {streak} step{'s' * (streak > 1)}"
    return alarm(message) if streak >= limits.nonfinite_steps else warning(message)


@rule(TRAIN, advice="stop, lower optim.lr and go on from an earlier checkpoint", into=LOSS)
def loss_rising(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The mean loss of an epoch has risen over many epochs."""
    means = history.epochs(TRAIN)[-limits.trend_epochs - 1 :]
    if len(means) <= limits.trend_epochs:
        return None
    told = f"the loss went from {means[0]:.4g} to {means[-1]:.4g} over {limits.trend_epochs} epochs"
    return alarm(told) if rises(means) else ok(told)


@rule(TRAIN, advice="stop, lower optim.lr and go on from an earlier checkpoint", into=LOSS, stages=LANGUAGE)
def loss_diverging(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The recent loss is far above the best that the run had; an alarm where it is above what the run began with."""
    series = history.series(TRAIN)
    recent, buckets = series.recent(limits.window), series.buckets
    if len(recent) < limits.window or len(buckets) < 2:
        return None
    later = recent[-len(recent) // 2 :]  # where the loss falls fast, the whole window's median is behind the best
    now, best = float(min(np.median(recent), np.median(later))), float(buckets.min())
    told = f"the recent loss is {now:.4g}, the best was {best:.4g}"
    risen = now - best
    if risen < limits.loss_min_change or risen < NOISES * noise_of(series.recent()) or now < 1.3 * best:
        return ok(told)
    return alarm(told) if now > 2 * best or now > series.first[:FIRST_LOSSES].mean() else warning(told)


@rule(
    TRAIN,
    advice="check the learning rate, that answers have loss tokens, and that labels belong to their prompts",
    into=LOSS,
    stages=LANGUAGE,
)
def loss_not_falling(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """After a hundred steps no part of the run had a clearly smaller loss than its beginning."""
    series = history.series(TRAIN)
    buckets, first = series.buckets, series.first
    if series.num_points < JITTER_STEPS or first.mean() < limits.loss_min_change:
        return None
    best, start = float(buckets[1:].min()), float(first[:10].mean())
    told = f"the loss began at {start:.4g} and was {best:.4g} at its best"
    error = noise_of(series.recent()) / np.sqrt(10)
    # the best of many parts is below their mean by some errors of a part, whatever is learnt
    return ok(told) if start - best > max(1.5 * NOISES * error, 0.02 * start) else warning(told)


@rule(
    TRAIN,
    advice="a larger train_batch_size or a smaller optim.lr calms it; judge by the mean over an epoch",
    into=LOSS,
)
def loss_jitter(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The loss jumps more than jitter explains: by much of its level, or for a policy loss to extreme values."""
    recent = history.series(TRAIN).recent(JITTER_STEPS)
    if len(recent) < JITTER_STEPS:
        return None
    trend = trend_of(recent)
    spread = float(np.std(recent - np.linspace(-0.5, 0.5, len(recent)) * trend.change))
    told = f"the loss moves by {spread:.3g} around {recent.mean():.3g}, its trend is {trend.change:+.3g}"
    if facts.stage in REWARDED:
        largest = float(np.abs(recent).max())
        return ok(told) if largest <= limits.policy_loss_max else warning(f"{told}; it reached {largest:.3g}")
    level = abs(float(recent.mean())) + limits.loss_min_change
    return ok(told) if spread <= limits.loss_jitter_max * level or trend.z < -NOISES else warning(told)


@rule(
    TRAIN,
    advice="groups have no signal: check that rewards differ within a group, and rollout.n",
    into=LOSS,
    stages=REWARDED,
)
def loss_zero(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The policy loss has been exactly 0 for all recent steps: no group gave an advantage."""
    recent = history.series(TRAIN).recent(limits.window)
    if len(recent) < limits.window:
        return None
    if np.abs(recent).max() > 0:
        return ok("the loss is not 0 throughout")
    return alarm(f"the loss was 0 in each of the last {len(recent)} steps")


@rule(
    TRAIN,
    advice="check the chat template, the tokenizer and that the weights were loaded",
    into=LOSS,
    stages=LANGUAGE,
)
def initial_loss(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The first steps' loss is above what a pretrained model has on text; with untrained weights, above guessing."""
    first = history.series(TRAIN).first[:FIRST_LOSSES]
    if len(first) < FIRST_LOSSES:
        return None
    told, highest = f"the loss began at {first.mean():.3g}", limits.initial_loss_max
    if facts.untrained_loss is not None:
        told += f", and random guessing has {facts.untrained_loss:.3g}"
        highest = max(highest, GUESSING_MARGIN * facts.untrained_loss)
    return ok(told) if first.mean() <= highest else warning(told)


@rule(
    TRAIN,
    advice="likely memorised; compare val/loss, and take an earlier checkpoint or fewer epochs",
    into=LOSS,
    stages=LANGUAGE,
)
def final_loss(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """Towards the end of the run the loss is below what anything but memory reaches."""
    recent = history.series(TRAIN).recent(limits.window)
    if not facts.total_steps or history.step < 0.9 * facts.total_steps or len(recent) < limits.window:
        return None
    last = float(np.median(recent))
    told = f"the loss is {last:.3g} towards the end"
    if last >= limits.final_loss_min:
        return ok(told)
    validated = history.series("val/loss").last_value
    generalises = validated < max(2 * last, limits.final_loss_min)  # False for NaN, where nothing was validated
    return ok(f"{told}, and val/loss is {validated:.3g}") if generalises else warning(told)
