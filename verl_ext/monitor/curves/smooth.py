"""Smoothing of curves: exponential, then a moving average."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import uniform_filter1d
from scipy.signal import lfilter

FEWEST_POINTS = 30
"""Of a curve that is smoothed."""
Array = NDArray[np.float64]


def ema(values: Array, weight: float) -> Array:
    """Exponential moving average, the share of the unknown past divided out, as in Adam (Kingma and Ba, 2015).

    Args:
        values: (points,), finite.
        weight: of the past, from 0 (the values themselves) to below 1.
    """
    if not len(values) or weight == 0:
        return values
    past = lfilter([1 - weight], [1, -weight], values)
    return past / (1 - weight ** np.arange(1, len(values) + 1))


def moving_average(values: Array, window: int) -> Array:
    """Mean over a window about each point; at the ends over the part of it that there is.

    Args:
        values: (points,), finite.
        window: points, odd; 1 leaves the values as they are.
    """
    if not len(values) or window <= 1:
        return values
    total = uniform_filter1d(values, window, mode="constant")
    return total / uniform_filter1d(np.ones_like(values), window, mode="constant")


def smooth(values: Array, weight: float) -> Array:
    """Both, the window growing with the weight: 0 is none of it, 0.9 an average over 9 points."""
    return moving_average(ema(values, weight), 1 + 2 * round(weight * 4.5))


def is_worth_smoothing(num_points: int, weight: float) -> bool:
    """Whether a curve is drawn smoothed: of a few points, such as validations, nothing would be left."""
    return weight > 0 and num_points >= FEWEST_POINTS
