"""95 % confidence intervals of rates: how far they might be off had other problems been asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import norm, t

from eval_pipeline.figures.judged import Judged
from eval_pipeline.figures.pass_at_k import pass_at_k_of_problems
from eval_pipeline.figures.rates import RATES, rows_of_problems, shares

CONFIDENCE = 0.95

Interval = tuple[float, float]
Intervals = Mapping[str, Interval]
"""Interval by metric name."""

_Z = float(norm.ppf(0.5 + CONFIDENCE / 2))


def rate_intervals(judged: Sequence[Judged]) -> dict[str, Interval]:
    """Interval of every rate of a data set, and of pass@k where there are several answers per problem.

    With one answer per problem these are Wilson's. Several answers to one problem are alike, so they say less than as
    many answers to different problems: there, `wilson_clustered` takes problems as clusters.

    Args:
        judged: the same number of answers to each problem, at least one.
    """
    rows = rows_of_problems(judged)
    of_problems = {name: shares(rows, counts) for name, counts in RATES.items()} | pass_at_k_of_problems(rows)
    return {name: wilson_clustered(values, len(rows[0])) for name, values in of_problems.items()}


def wilson(k: float, n: float) -> Interval:
    """Wilson's score interval of a rate, without correction for continuity.

    Args:
        k: what counted; may be a fraction, where n is an effective number.
        n: of how many, above 0.

    Source:
        Wilson 1927, Probable Inference, the Law of Succession, and Statistical Inference, JASA 22(158).
    """
    rate = k / n
    centre = (rate + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(rate * (1 - rate) / n + _Z**2 / (4 * n**2))
    # at 0 and 1 rounding would leave a bound a hair inside the rate
    return min(max(centre - half, 0.0), rate), max(min(centre + half, 1.0), rate)


def wilson_clustered(shares_of_problems: ArrayLike, num_samples: int) -> Interval:
    """Wilson's interval with the effective number of answers in the place of their number.

    The effective number is that of independent answers with the variance seen between problems, p (1 - p) / Var(p),
    times (z / t)² because that variance is itself an estimate from as many problems. It lies between the number of
    problems (a problem's answers are all alike) and that of answers (they are independent); where all problems agree,
    so that no variance is seen, it is the number of problems.

    Args:
        shares_of_problems: share of each problem's answers that count, 0 to 1, of shape (problem,).
        num_samples: answers per problem.

    Source:
        Kish 1965, Survey Sampling (design effect); Korn and Graubard 1998, Survey Methodology 24(2) (degrees of
        freedom); Dean and Pagano 2015, J. Survey Statistics and Methodology 3(4) (Wilson's among the best of these).
    """
    values = np.asarray(shares_of_problems, dtype=float)
    num_problems, rate = len(values), float(np.mean(values))
    effective = float(num_problems)
    variance = float(np.var(values, ddof=1)) / num_problems if num_problems > 1 else 0.0
    if num_samples > 1 and variance > 0:
        few = (_Z / float(t.ppf(0.5 + CONFIDENCE / 2, num_problems - 1))) ** 2
        seen = few * rate * (1 - rate) / variance
        effective = min(max(seen, num_problems), num_problems * num_samples)
    return wilson(rate * effective, effective)
