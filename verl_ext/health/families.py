"""Families of checks that most rules use: thresholds, trends, plateaus, shrinking, past the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from verl_ext.health.context import RunContext
from verl_ext.health.rule import REWARD, Check, CheckResult, HealthView, Level, notice, ok, warning
from verl_ext.health.trend import Array, trend

AFTER_BEST = 2
"""Number of consecutive worse measurements after which the best one counts as passed."""
MIN_TREND = 4
"""Minimum number of measurements with a trend."""
MIN_EARLY_STEPS = 30
"""Minimum number of steps before values are compared with the start of the run."""
Measure = Callable[[HealthView], tuple[float, ...] | None]
"""Returns a number to check and further numbers for the message; None without enough data."""
Thresholds = Mapping[Level, float | str]
"""A number, or the name of a limit, by level."""


def bounds(
    measure: Measure,
    text: str,
    above: Thresholds | None = None,
    below: Thresholds | None = None,
    advice_below: str | None = None,
) -> Check:
    """Compare a number with upper and lower thresholds.

    Args:
        measure: returns the number, such as `median(METRIC)`.
        text: the message, with fields for the numbers that `measure` returns.
        above: upper thresholds.
        below: lower thresholds.
        advice_below: advice if the number is too low.
    """

    def check(view: HealthView) -> CheckResult | None:
        numbers = measure(view)
        if numbers is None:
            return None
        high = [level for level, bound in (above or {}).items() if numbers[0] > view.threshold(bound)]
        low = [level for level, bound in (below or {}).items() if numbers[0] < view.threshold(bound)]
        return CheckResult(max(high + low, default=Level.OK), text.format(*numbers), advice_below if low else None)

    return check


def median(metric: str, at_least: int | None = None) -> Measure:
    """The median of the recent values."""

    def measure(view: HealthView) -> tuple[float, ...] | None:
        values = view.recent(metric, at_least=at_least)
        return None if values is None else (float(np.median(values)),)

    return measure


def largest(metric: str) -> Measure:
    """The largest absolute recent value."""

    def measure(view: HealthView) -> tuple[float, ...] | None:
        values = view.recent(metric)
        return None if values is None else (float(np.abs(values).max()),)

    return measure


def share_of_limit(
    metric: str, statistic: Callable[[Array], np.floating], limit: Callable[[RunContext], int | None], at_least: int
) -> Measure:
    """A statistic of the recent values relative to a limit of the run, followed by both numbers."""

    def measure(view: HealthView) -> tuple[float, ...] | None:
        maximum, values = limit(view.context), view.recent(metric, at_least=at_least)
        if maximum is None or values is None:
            return None
        value = float(statistic(values))
        return value / maximum, value, maximum

    return measure


def epoch_trend(metric: str, wrong: int, text: str, worst: Level, matters_above: float | str = -math.inf) -> Check:
    """Check that the means of the last epochs do not move in the wrong direction.

    Args:
        wrong: 1 if the metric must not rise, -1 if it must not fall.
        text: the message, with fields for the first and the last mean and the number of epochs.
        worst: the highest level; an alarm needs a smaller p-value than a warning.
        matters_above: threshold that the last mean must exceed.
    """

    def check(view: HealthView) -> CheckResult | None:
        means = view.epochs(metric, view.limits.trend_epochs + 1)
        if means is None:
            return None
        level = Level.OK
        if means[-1] > view.threshold(matters_above):
            level = min(worst, trend_level(view, means, wrong))
        return CheckResult(level, text.format(means[0], means[-1], view.limits.trend_epochs))

    return check


def trend_level(view: HealthView, means: Array, wrong: int) -> Level:
    """Return the level of a trend of epoch means."""
    found = trend(means)
    if found.goes(wrong, view.limits.trend_p_alarm):
        return Level.ALARM
    return Level.WARNING if found.goes(wrong, view.limits.trend_p) else Level.OK


def plateau(metrics: Sequence[str], what: str) -> Check:
    """Return a notice if the first logged metric does not rise over many epochs; it may have reached a plateau.

    In runs with few epochs, segments of the whole run replace epochs.
    """

    def check(view: HealthView) -> CheckResult | None:
        name = view.first_logged(metrics)
        if name is None:
            return None
        count, unit = view.limits.stuck_epochs, "epochs"
        means = view.epochs(name, count)
        if means is None:
            means, unit = view.series(name).segment_means, "parts of the run"
        if len(means) < count:
            return None
        rises = trend(means).rises(view.limits.improvement_p)
        message = f"{what} went from {means[0]:.3g} to {means[-1]:.3g} over {len(means)} {unit}"
        return ok(message) if rises else notice(message)

    return check


def shrunk(metric: str, share: str, text: str) -> Check:
    """Warn if a metric is below a fraction of its first values; only a notice if the reward has risen since."""

    def check(view: HealthView) -> CheckResult | None:
        series = view.series(metric)
        if series.num_points < MIN_EARLY_STEPS:
            return None
        first, now = float(series.first.mean()), float(np.median(series.recent(view.limits.window)))
        message = text.format(first, now)
        if now > view.threshold(share) * first:
            return ok(message)
        return notice(f"{message}, and the reward rose") if view.has_improved(REWARD, 1) else warning(message)

    return check


def past_best(measured: str, trained: str, better: int, worse_by: Callable[[HealthView, Array, float], float]) -> Check:
    """Warn if a validation metric becomes worse than its best while the training metric improves.

    If the training metric does not improve, or the fall may be temporary, the result is a notice.

    Args:
        measured: metric of validations or evaluations.
        trained: its counterpart in training.
        better: 1 if higher is better, -1 if lower is.
        worse_by: returns the smallest significant difference from the best, given all values and the best.
    """

    def check(view: HealthView) -> CheckResult | None:
        points = view.comparable_points(measured)
        if len(points) < 2:
            return None
        values = np.array([value for _, value in points])
        place = int((better * values).argmax())
        (step, best), later = points[place], values[place + 1 :]
        if not len(later):
            return ok(f"{measured} is at its best, {best:.4g}, at step {step}")
        message = f"{measured} was {best:.4g} at step {step} and is {values[-1]:.4g} at step {points[-1][0]}"
        margin, worse = worse_by(view, values, best), better * (best - later)
        is_worse = worse > margin
        num_worse = len(later) if is_worse.all() else int(is_worse[::-1].argmin())
        # a trend is significant even if the difference of two values is within their noise
        moves_away = len(later) >= MIN_TREND and trend(later).goes(-better, view.limits.trend_p)
        if not num_worse and not (moves_away and worse[-1] > worse_by(view, later[-1:], best)):
            return ok(f"{message}, not significantly worse (threshold: {margin:.3g})")
        recovers = better * (later[-1] - later[-num_worse]) > 0
        if num_worse < AFTER_BEST or recovers or not _improves_after(view, trained, better, step):
            return notice(message)
        change = "rises" if better > 0 else "falls"
        return warning(f"{message}, while {trained} {change}{_checkpoint_near(view, step)}")

    return check


def _improves_after(view: HealthView, metric: str, better: int, step: int) -> bool:
    """Whether the values of a metric after a step are better than those just before it."""
    points = view.series(metric).points()
    after = [value for each, value in points if each > step]
    before = [value for each, value in points if each <= step]
    if not before:  # the recent values start after the step
        before = list(view.series(metric).segment_means)
    return bool(after) and bool(before) and bool(better * (np.median(after[-20:]) - np.median(before[-20:])) > 0)


def _checkpoint_near(view: HealthView, step: int) -> str:
    kept = view.context.checkpoints()
    if not kept:
        return ""
    nearest = min(kept, key=lambda each: (abs(each - step), each))
    return f"; the checkpoint to use is global_step_{nearest}"
