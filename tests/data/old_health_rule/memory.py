"""A health rule: memory that grows with the run is a leak, and ends it sooner or later."""

from __future__ import annotations

from verl_ext.health.facts import Facts
from verl_ext.health.findings import Seen, ok, warning
from verl_ext.health.history import History
from verl_ext.health.limits import Limits
from verl_ext.health.rule import Rule, rule
from verl_ext.health.trends import trend_of

RULES: list[Rule] = []
MEMORY = "system/peak_memory_gib"
GROWTH = 0.2
"""Share by which the memory may grow over a run, its beginning left out."""


@rule(MEMORY, advice="look for what is kept of every step, such as losses with their graphs", into=RULES)
def memory_growing(history: History, facts: Facts, limits: Limits) -> Seen | None:
    """The largest memory of a rank has grown all along."""
    # means over equal parts of the run; in the first one models and caches fill up
    parts = history.series(MEMORY).buckets[1:]
    if len(parts) < 6:
        return None
    growth, late = trend_of(parts).change, trend_of(parts[len(parts) // 2 :]).change
    told = f"the peak memory changed by {growth / parts[0]:+.0%} over the run, to {parts[-1]:.3g} GiB"
    return warning(told) if growth > GROWTH * parts[0] and late > growth / 4 else ok(told)
