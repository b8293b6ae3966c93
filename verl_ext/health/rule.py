"""A rule with its check, the view that checks read, and findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from verl_ext.errors import one_line
from verl_ext.health.config import HealthLimits
from verl_ext.health.context import STAGES, RunContext
from verl_ext.health.history import MetricHistory, MetricSeries
from verl_ext.health.trend import Array, noise

LOSS, VAL_LOSS, GRAD_NORM, STEP_TIME = "train/loss", "val/loss", "train/grad_norm", "time/train/step_s"
REWARD, EVAL_REWARD = "train/reward_total_mean", "eval/reward_total_mean"
EVAL_REWARD_STD, ADV_STD = "eval/reward_total_std", "train/adv_std"
ACCURACY, VIOLATION = "train/accuracy_mean", "train/budget_violation_mean"
CORRECT = ("train/reward_correct_mean", ACCURACY, "train/code_tests_mean")
"""Metrics that measure how often answers are right; a run logs one of them."""
NOISES = 4.0
"""Standard deviations above which a difference is not noise."""
ROUNDING = 1e-9
"""Relative difference up to which two means are equal; the mean of equal numbers can differ from them."""
NEAR_END = 0.9
"""Fraction of a run's steps after which its values are final."""


class Level(IntEnum):
    """Severity of a result, in ascending order."""

    OK = 0
    NOTICE = 1
    WARNING = 2
    ALARM = 3

    @property
    def word(self) -> str:
        """The name in messages and files."""
        return self.name.lower()


@dataclass(frozen=True)
class CheckResult:
    """Result of a check: a message without a period, and advice if it differs from the rule's."""

    level: Level
    message: str
    advice: str | None = None


def ok(message: str) -> CheckResult:
    """A result without a problem."""
    return CheckResult(Level.OK, message)


def notice(message: str) -> CheckResult:
    """A result that is worth knowing and often harmless."""
    return CheckResult(Level.NOTICE, message)


def warning(message: str) -> CheckResult:
    """A result that indicates a probable problem."""
    return CheckResult(Level.WARNING, message)


def alarm(message: str) -> CheckResult:
    """A result that puts the outcome of the run at risk."""
    return CheckResult(Level.ALARM, message)


@dataclass(frozen=True)
class HealthView:
    """What a check can read: the metrics so far, the context of the run, and the thresholds."""

    history: MetricHistory
    context: RunContext
    limits: HealthLimits

    def series(self, metric: str) -> MetricSeries:
        """The values of a metric; empty if it was never logged."""
        return self.history.series(metric)

    def recent(self, metric: str, count: int | None = None, at_least: int | None = None) -> Array | None:
        """The latest values of a metric, oldest first; None if there are too few.

        Args:
            count: number of values; None uses `health.limits.window`.
            at_least: minimum number of values; None requires `count`.
        """
        count = count or self.limits.window
        values = self.series(metric).recent(count)
        return values if len(values) >= (count if at_least is None else at_least) else None

    def comparable_points(self, metric: str) -> list[tuple[int, float]]:
        """Step and value of the validations that measure the same as the latest."""
        return [point for point in self.series(metric).points() if point[0] >= self.context.comparable_from]

    def epochs(self, metric: str, count: int) -> Array | None:
        """Means of a metric over the last `count` epochs, oldest first; None if there were fewer."""
        means = self.history.epochs(metric)[-count:]
        return means if len(means) == count else None

    def first_logged(self, metrics: Sequence[str]) -> str | None:
        """The first of several metrics that the run has logged."""
        return next((each for each in metrics if self.series(each).num_points), None)

    def threshold(self, threshold: float | str) -> float:
        """The threshold itself if it is a number, otherwise the limit with that name."""
        return float(vars(self.limits)[threshold]) if isinstance(threshold, str) else threshold

    @property
    def is_near_end(self) -> bool:
        """Whether the run is in its last tenth."""
        total = self.context.total_steps
        return total is not None and self.history.step >= NEAR_END * total

    def has_improved(self, metric: str, sign: int) -> bool:
        """Whether the recent values are better than the first ones by more than noise.

        Args:
            sign: 1 if higher is better, -1 if lower is.
        """
        series, window = self.series(metric), self.limits.window
        if not series.num_points:
            return False
        first = float(series.first.mean())
        gained = sign * (float(np.median(series.recent(window))) - first)
        error = NOISES * noise(series.recent()) / math.sqrt(min(len(series.first), window))
        return gained > max(error, ROUNDING * abs(first))


Check = Callable[[HealthView], CheckResult | None]
"""Returns None if the run has not logged enough yet."""


@dataclass(frozen=True)
class Finding:
    """Result of a rule at the last step of a run, with advice."""

    rule: str
    level: Level
    message: str
    advice: str
    step: int

    @property
    def sentence(self) -> str:
        """The message, and the advice if there is something to do."""
        return self.message if self.level == Level.OK else f"{self.message}; {self.advice}"


@dataclass(frozen=True)
class Rule:
    """A problem that a run can have.

    Attributes:
        name: name in recipes and messages.
        check: detects the problem; a pure function of the view.
        description: one sentence that says when the rule reports a problem.
        advice: one sentence without a period that says what to do.
        stages: stages that the rule applies to.
    """

    name: str
    check: Check
    description: str
    advice: str
    stages: frozenset[str] = STAGES

    def run(self, view: HealthView) -> Finding | None:
        """Run the check; None if the rule does not apply to this stage, or without enough data.

        An exception in a check becomes a notice, so that the other rules are still checked.
        """
        if view.context.stage not in self.stages:
            return None
        try:
            result = self.check(view)
            if not isinstance(result, CheckResult | None):
                raise TypeError(f"a check must return a CheckResult or None, not {type(result).__name__}")
        except Exception as error:  # users write rules, too
            result = notice(f"the rule itself failed ({one_line(error)})")
        if result is None:
            return None
        return Finding(self.name, result.level, result.message, result.advice or self.advice, view.history.step)
