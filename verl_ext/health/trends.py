"""How a series moves: its trend beside its noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from verl_ext.health.series import Array

RISING_SHARE, RISING_Z = 0.8, 4.0
"""Of a series that rises: how many of its steps go up, and by how many standard errors the whole."""
_NORMAL = 1.4826
"""Standard deviations in a median absolute deviation of normal noise."""


@dataclass(frozen=True)
class Trend:
    """A straight line through a series.

    Attributes:
        change: from its beginning to its end.
        noise: standard deviation around it, robust.
        z: the change in its own standard errors.
    """

    change: float
    noise: float
    z: float


def noise_of(values: Array) -> float:
    """Standard deviation of what is no trend, from the differences of neighbours; robust.

    Neighbours differ by the noise of two; what the series does over many points hardly matters (von Neumann, 1941).
    """
    if len(values) < 3:
        return 0.0
    differences = np.diff(values)
    return float(_NORMAL * np.median(np.abs(differences - np.median(differences))) / math.sqrt(2))


def trend_of(values: Array) -> Trend:
    """Least squares over the places of the values.

    The standard error of the change is noise * sqrt(12 / n), that of a slope over n equal distances.
    """
    count = len(values)
    if count < 3:
        return Trend(0.0, 0.0, 0.0)
    places = np.arange(count) - (count - 1) / 2
    slope = float(places @ values) / float(places @ places)
    rest = values - values.mean() - slope * places
    noise = float(_NORMAL * np.median(np.abs(rest - np.median(rest))))
    change = slope * (count - 1)
    error = noise * math.sqrt(12 / count)
    return Trend(change, noise, change / error if error > 0 else math.copysign(math.inf, change) if change else 0.0)


def rises(values: Array) -> bool:
    """Whether nearly every value is above the one before, and the whole is more than noise."""
    steps = np.diff(values)
    return len(steps) > 0 and float((steps > 0).mean()) >= RISING_SHARE and trend_of(values).z >= RISING_Z


def falls(values: Array) -> bool:
    """Whether the mirrored series rises."""
    return rises(-values)
