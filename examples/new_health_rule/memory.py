"""A health rule: memory that grows throughout the run is a leak, which eventually ends the run."""

from __future__ import annotations

from verl_ext.health.rule import CheckResult, HealthView, Rule, ok, warning
from verl_ext.health.trend import trend

MEMORY = "system/peak_memory_gib"
GROWTH = 0.2
"""Share by which the memory may grow over a run after its start."""


def memory_growing(view: HealthView) -> CheckResult | None:
    """Compare the growth over the run with that of its second half, so that a single jump is not a leak."""
    # means over equal segments of the run; in the first one, models and caches fill up
    means = view.series(MEMORY).segment_means[1:]
    if len(means) < 6:
        return None
    growth, late = trend(means).change, trend(means[len(means) // 2 :]).change
    message = f"the peak memory changed by {growth / means[0]:+.0%} over the run, to {means[-1]:.3g} GiB"
    return warning(message) if growth > GROWTH * means[0] and late > growth / 4 else ok(message)


RULES = [
    Rule(
        "memory_growing",
        memory_growing,
        "The peak memory of a rank grows over the whole run.",
        "look for data that is kept from every step, such as losses with their graphs",
    )
]
