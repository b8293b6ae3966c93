"""What could be had without a controller: static configurations, a table of them by budget, an oracle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval_pipeline.adaptive.results import Results

ALLOWED_VIOLATIONS = 0.05
"""Share of the training questions on which an entry of the lookup table may be too late."""


def pareto_front(results: Results) -> list[int]:
    """Columns that no other one beats in mean accuracy without a greater mean latency, from the quickest on."""
    accuracy, latency = results.accuracy.mean(0), results.latency_ms.mean(0)
    front: list[int] = []
    for column in np.lexsort((-accuracy, latency)).tolist():
        if not front or accuracy[column] > accuracy[front[-1]]:
            front.append(column)
    return front


def lookup_table(train: Results, budgets_ms: Sequence[float]) -> list[int]:
    """For each budget the column that is best on training questions.

    It has the greatest mean accuracy of those whose violation rate is at most `ALLOWED_VIOLATIONS`, and of equal ones
    the least mean latency. Where none is, it is the one with the least mean latency.

    Args:
        train: (training samples, configurations).
        budgets_ms: of the table.
    """
    accuracy, latency = train.accuracy.mean(0), train.latency_ms.mean(0)
    table = []
    for budget in budgets_ms:
        rates = (train.latency_ms > budget).mean(0)
        allowed = np.flatnonzero(rates <= ALLOWED_VIOLATIONS)
        ranked = sorted(allowed, key=lambda column: (-accuracy[column], latency[column]))
        table.append(int(ranked[0] if ranked else latency.argmin()))
    return table


def oracle(candidates: Results, budgets_ms: Sequence[float]) -> Results:
    """For each sample and budget the most accurate result within the budget, and of equal ones the quickest.

    Where none is within the budget, it is the quickest of all.

    Args:
        candidates: (samples, configurations), all that were run.
        budgets_ms: (budgets,), the columns of what is returned.
    """
    by_latency = candidates.picked(candidates.latency_ms.argsort(axis=1, kind="stable"))
    # the first of the greatest is the quickest of them; with none within the budget, it is the quickest of all
    fits = [by_latency.latency_ms <= budget for budget in budgets_ms]
    chosen = [np.where(fit, by_latency.accuracy, -1.0).argmax(axis=1) for fit in fits]
    return by_latency.picked(np.stack(chosen, axis=1))
