"""The interface of user rules before `Rule(name, check, ...)`; the next release removes it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from verl_ext.health import history as history_module
from verl_ext.health import rule as rule_module
from verl_ext.health.config import HealthLimits
from verl_ext.health.context import STAGES, RunContext
from verl_ext.health.history import MetricHistory, MetricSeries
from verl_ext.health.rule import CheckResult, Finding, HealthView, Level, Rule, alarm, notice, ok, warning
from verl_ext.health.trend import Array, noise, trend

OldCheck = Callable[["OldHistory", RunContext, HealthLimits], CheckResult | None]


@dataclass(frozen=True)
class DecoratedRule(Rule):
    """A rule that `@rule` created."""


class OldHistory(MetricHistory):
    """A history whose series have `buckets`."""

    def __init__(self, history: MetricHistory) -> None:
        streak = history.series("train/loss").nonfinite_streak  # first, because this adds buffered rows
        vars(self).update(vars(history))
        self.nonfinite_streak = streak

    def series(self, name: str) -> OldSeries:
        """A metric; empty if it was never logged."""
        return OldSeries(super().series(name))

    def num_nonfinite(self, name: str, count: int) -> int:
        """Number of non-finite values among the last `count`."""
        return self.series(name).num_nonfinite(count)


class OldSeries(MetricSeries):
    """A series with `buckets` and `last_step`."""

    def __init__(self, series: MetricSeries) -> None:
        vars(self).update(vars(series))

    @property
    def buckets(self) -> Array:
        """See `MetricSeries.segment_means`."""
        return self.segment_means

    @property
    def last_step(self) -> int:
        """Step of the last value; 0 if there is none."""
        return self._recent[-1][0] if self._recent else 0


@dataclass(frozen=True)
class OldTrend:
    """A straight line through a series: its change, the noise around it, and the change in standard errors."""

    change: float
    noise: float
    z: float


def trend_of(values: Array) -> OldTrend:
    """Fit the least-squares line; the standard error of its change is noise * sqrt(12 / n)."""
    if len(values) < 3:
        return OldTrend(0.0, 0.0, 0.0)
    places = np.arange(len(values))
    slope, start = np.polyfit(places, values, 1)
    rest = values - start - slope * places
    spread = float(1.4826 * np.median(np.abs(rest - np.median(rest))))
    change, error = float(slope) * (len(values) - 1), spread * (12 / len(values)) ** 0.5
    return OldTrend(change, spread, change / error if error > 0 else float(np.sign(change)) * np.inf if change else 0.0)


def rises(values: Array) -> bool:
    """Whether a series rises."""
    return trend(values).rises(HealthLimits().trend_p)


def falls(values: Array) -> bool:
    """Whether a series falls."""
    return trend(values).falls(HealthLimits().trend_p)


def rule(
    *watches: str, advice: str, into: list[Rule], stages: Iterable[str] = STAGES
) -> Callable[[OldCheck], OldCheck]:
    """Add a check to a list of rules, named after its function and described by its docstring."""

    def enter(check: OldCheck) -> OldCheck:
        def new_check(view: HealthView) -> CheckResult | None:
            return check(OldHistory(view.history), view.context, view.limits)

        description = " ".join((check.__doc__ or "").split())
        into.append(DecoratedRule(check.__name__, new_check, description, advice, frozenset(stages)))
        return check

    return enter


OLD_MODULES: dict[str, dict[str, object]] = {
    "facts": {"Facts": RunContext},
    "findings": {each.__name__: each for each in (Level, Finding, ok, notice, warning, alarm)} | {"Seen": CheckResult},
    "limits": {"Limits": HealthLimits},
    "series": {"Series": OldSeries},
    "trends": {"trend_of": trend_of, "noise_of": noise, "rises": rises, "falls": falls},
}
"""Contents of the former modules of this folder, by module name."""


def provide_modules() -> None:
    """Let user code import the former modules and names."""
    for name, content in OLD_MODULES.items():
        module = ModuleType(f"verl_ext.health.{name}")
        vars(module).update(content)
        sys.modules.setdefault(module.__name__, module)
    vars(history_module)["History"] = OldHistory
    vars(rule_module)["rule"] = rule
