"""Paired comparison of two models on the same problems, with significance tests."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from eval_pipeline.judge import ErrorType
from eval_pipeline.report.metrics import CONFIDENCE, RAN, SOLVED, Interval
from eval_pipeline.report.results import Outcomes
from verl_ext.errors import UserError
from verl_ext.significance import paired_test

COMPARED: dict[str, tuple[ErrorType, ...]] = {"exec_success_rate": RAN, "accepted_at_1": SOLVED}
"""The compared rates, each with the error types that count toward it."""


@dataclass(frozen=True)
class RateComparison:
    """Model b compared with model a in one rate."""

    num_problems: int
    num_samples: int
    """Answers per problem and model."""
    both: int | None
    """Problems that count for both models. Like the next three, None with several answers per problem."""
    only_a: int | None
    only_b: int | None
    neither: int | None
    difference: float
    """Rate of b minus rate of a."""
    interval: Interval
    """95% confidence interval of the difference."""
    p_value: float
    """Probability of a difference at least this large, in either direction, if both models were equally good."""
    test: str


def compare_models(a: Outcomes, b: Outcomes) -> dict[str, RateComparison]:
    """Compare two models problem by problem in each rate of `COMPARED`.

    Raises:
        UserError: the models were evaluated on different problems, or with different numbers of answers.
    """
    num_samples = _require_same_problems(a, b)
    return {name: _compare(a, b, kinds, num_samples) for name, kinds in COMPARED.items()}


def paired_interval(differences: NDArray[np.float64]) -> Interval:
    """95% confidence interval of the mean of paired differences.

    Student's interval after adding one won and one lost problem. Without them, it would be too narrow with few
    discordant problems, and a point with none.

    Args:
        differences: b minus a for each problem, -1 to 1.

    Source:
        Bonett and Price 2012, J. Educational and Behavioral Statistics 37(4), for one answer per problem and with the
        normal instead of Student's distribution.
    """
    padded = np.append(differences, [1.0, -1.0])
    size = len(padded)
    half = float(t.ppf(0.5 + CONFIDENCE / 2, size - 1)) * float(np.std(padded)) / math.sqrt(size)
    center = float(np.mean(padded))
    return max(center - half, -1.0), min(center + half, 1.0)


def _require_same_problems(a: Outcomes, b: Outcomes) -> int:
    unshared = sorted(a.keys() ^ b.keys())
    if unshared or not a:
        example = f", such as {unshared[0]!r}" if unshared else ""
        raise UserError(
            f"{len(unshared)} problems were answered by only one of the two{example}, {len(a.keys() & b.keys())} by "
            "both; evaluate both on the same problems"
        )
    sizes = {len(kinds) for outcomes in (a, b) for kinds in outcomes.values()}
    if len(sizes) != 1:
        raise UserError(
            f"problems have {' or '.join(map(str, sorted(sizes)))} answers; evaluate both with the same "
            "sampling.num_samples"
        )
    return sizes.pop()


def _compare(a: Outcomes, b: Outcomes, kinds: Collection[ErrorType], num_samples: int) -> RateComparison:
    shares_a, shares_b = (np.array([np.mean([kind in kinds for kind in side[name]]) for name in a]) for side in (a, b))
    differences = shares_b - shares_a
    counts: dict[str, int | None] = dict.fromkeys(("both", "only_a", "only_b", "neither"))
    if num_samples == 1:
        only_a, only_b = int(np.sum(differences < 0)), int(np.sum(differences > 0))
        both = int(np.sum(shares_a)) - only_a
        counts = {"both": both, "only_a": only_a, "only_b": only_b, "neither": len(a) - both - only_a - only_b}
    p_value, test = paired_test(differences, num_samples)
    return RateComparison(
        num_problems=len(a),
        num_samples=num_samples,
        **counts,
        difference=float(np.mean(differences)),
        interval=paired_interval(differences),
        p_value=p_value,
        test=test,
    )
