"""Statistics of a series of values: the significance of its trend, its change, and its noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_NORMAL = 1.4826
"""Standard deviations in a median absolute deviation of normal noise."""


@dataclass(frozen=True)
class Trend:
    """The trend of a series.

    Attributes:
        change: change from the first to the last value of the least-squares line.
        sign: direction by the Mann-Kendall test: 1, -1, or 0 for none.
        p_value: one-sided p-value of the direction.
        count: number of values.
    """

    change: float
    sign: int
    p_value: float
    count: int

    def goes(self, sign: int, p_value: float) -> bool:
        """Whether the series moves significantly in a direction.

        A series that is too short to reach the p-value must be strictly monotone.
        """
        attainable = 1.001 / math.factorial(min(self.count, 20))
        return self.sign == sign and self.p_value < max(p_value, attainable)

    def rises(self, p_value: float) -> bool:
        """Whether the series rises significantly."""
        return self.goes(1, p_value)

    def falls(self, p_value: float) -> bool:
        """Whether the series falls significantly."""
        return self.goes(-1, p_value)


def trend(values: Array) -> Trend:
    """Test for a monotone trend (Mann, 1945; Kendall, 1975); outliers and the shape of the trend hardly matter."""
    count = len(values)
    if count < 3 or np.ptp(values) == 0:
        return Trend(0.0, 0, 1.0, count)
    from scipy.stats import kendalltau  # takes nearly a second to import

    tau = kendalltau(np.arange(count), values)
    return Trend(line_change(values), int(np.sign(tau.statistic)), float(tau.pvalue) / 2, count)


def line_change(values: Array) -> float:
    """Return the change from the first to the last value of the least-squares line."""
    if len(values) < 2:
        return 0.0
    places = np.arange(len(values)) - (len(values) - 1) / 2
    return float(places @ values) / float(places @ places) * (len(values) - 1)


def noise(values: Array) -> float:
    """Robust standard deviation around a slowly changing mean, from differences of neighbors (von Neumann, 1941)."""
    if len(values) < 3:
        return 0.0
    differences = np.diff(values)
    return float(_NORMAL * np.median(np.abs(differences - np.median(differences))) / math.sqrt(2))
