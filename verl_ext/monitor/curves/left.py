"""How fast a run is now, and how long it will take."""

from __future__ import annotations

from collections.abc import Sequence

RECENT_STEPS = 50
"""Whose speed counts: what was earlier may have been another machine."""


def steps_per_second(recent: Sequence[tuple[int, float]]) -> float | None:
    """Speed over the last steps of one attempt, pauses for saving and validating included.

    Args:
        recent: step and time in seconds, the newest last.
    """
    if len(recent) < 2:
        return None
    (first, begun), (last, now) = recent[0], recent[-1]
    return (last - first) / (now - begun) if last > first and now > begun else None


def seconds_left(recent: Sequence[tuple[int, float]], total_steps: int | None) -> float | None:
    """Until the last step, at the recent speed; None where that is not known."""
    speed = steps_per_second(recent)
    if speed is None or total_steps is None:
        return None
    return max(0, total_steps - recent[-1][0]) / speed
