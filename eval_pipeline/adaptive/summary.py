"""What the comparison comes to: the controller against the lookup table and the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from eval_pipeline.adaptive.results import Results
from eval_pipeline.report.metrics import CONFIDENCE, Interval

LEAST_GAP = 0.01
"""Accuracy that the oracle must have above the lookup table for the share of that gap to mean something: one point."""


@dataclass(frozen=True)
class Summary:
    """Accuracies from 0 to 1.

    Attributes:
        controller_minus_lookup_table: mean over budgets of the difference in accuracy.
        interval: of that, 95 %, as far as it depends on which questions were asked; None with a single question.
        gap_closed: share of the accuracy between lookup table and oracle that the controller has, the mean over
            budgets where that is at least `LEAST_GAP`; None where it is nowhere.
        num_gap_budgets: how many those are.
        worst_violation_rate: the controller's greatest over the budgets.
        worst_violation_budget_ms: where that is.
        decision_ms: mean of what deciding adds to a latency.
        features_ms: mean of pooling image and question, a part of it.
        network_ms: mean of the controller's forward pass, a part of it.
        choice_ms: mean of taking the likeliest configuration, a part of it.
        full_ms: mean latency of all of the model, as measured.
        network_share: `network_ms` / `full_ms`.
        measured_again: measurements that were made again over all runs, because something else had the processor.
    """

    controller_minus_lookup_table: float
    interval: Interval | None
    gap_closed: float | None
    num_gap_budgets: int
    worst_violation_rate: float
    worst_violation_budget_ms: float
    decision_ms: float
    features_ms: float
    network_ms: float
    choice_ms: float
    full_ms: float
    network_share: float
    measured_again: float


def summarise(
    methods: Mapping[str, Results],
    budgets_ms: Sequence[float],
    deciding: Mapping[str, float],
    full_ms: float,
    measured_again: float = 0.0,
) -> Summary:
    """Compare.

    Args:
        methods: results (samples, budgets) of `controller`, `lookup_table` and `oracle`.
        budgets_ms: (budgets,).
        deciding: means of `decision_ms`, `features_ms`, `network_ms` and `choice_ms`.
        full_ms: mean latency of all of the model.
        measured_again: see `Summary`.
    """
    controller, table = methods["controller"], methods["lookup_table"]
    violations = controller.violations(budgets_ms).mean(0)
    gains = controller.accuracy - table.accuracy
    gap_closed, num_gaps = closed_gap(gains.mean(0), (methods["oracle"].accuracy - table.accuracy).mean(0))
    return Summary(
        float(gains.mean()),
        mean_interval(gains.mean(1)),
        gap_closed,
        num_gaps,
        float(violations.max()),
        float(budgets_ms[int(violations.argmax())]),
        **deciding,
        full_ms=full_ms,
        network_share=deciding["network_ms"] / full_ms,
        measured_again=measured_again,
    )


def closed_gap(gains: NDArray[np.float64], gaps: NDArray[np.float64]) -> tuple[float | None, int]:
    """The mean share of the gaps that are at least `LEAST_GAP`, and how many those are.

    Args:
        gains: (budgets,), accuracy that the controller has above the lookup table.
        gaps: (budgets,), accuracy that the oracle has above it.
    """
    wide = gaps >= LEAST_GAP - 1e-9  # a gap of just one point, but for rounding
    return (float((gains[wide] / gaps[wide]).mean()), int(wide.sum())) if wide.any() else (None, 0)


def mean_interval(values: NDArray[np.float64]) -> Interval | None:
    """Student's interval of a mean over samples (samples,); None with fewer than two."""
    if len(values) < 2:
        return None
    half = float(t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    return float(values.mean()) - half, float(values.mean()) + half
