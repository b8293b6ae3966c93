"""What was measured, as matrices, and what methods make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Cell = tuple[float, float, float]
"""Accuracy from 0 to 1, milliseconds, and complexity of a configuration that was run for a sample."""


@dataclass(frozen=True)
class Results:
    """Of samples by columns, which are configurations or budgets.

    Attributes:
        accuracy: (samples, columns), from 0 to 1.
        latency_ms: (samples, columns).
        complexity: (samples, columns), the share of the model that ran.
    """

    accuracy: NDArray[np.float64]
    latency_ms: NDArray[np.float64]
    complexity: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[Sequence[Cell]]) -> Results:
        """From the cells of each sample."""
        return cls(*np.moveaxis(np.array(rows, dtype=float), -1, 0))

    def columns(self, chosen: Sequence[int]) -> Results:
        """These columns, in this order, any of them as often as it is named."""
        return Results(*(part[:, list(chosen)] for part in self.parts))

    def picked(self, chosen: NDArray[np.int64]) -> Results:
        """For each sample the columns (samples, picks) that are chosen for it."""
        return Results(*(np.take_along_axis(part, chosen, axis=1) for part in self.parts))

    def beside(self, other: Results) -> Results:
        """The columns of both."""
        return Results(*(np.concatenate(pair, axis=1) for pair in zip(self.parts, other.parts)))

    def later(self, added_ms: NDArray[np.float64]) -> Results:
        """The same with latencies that are longer by (samples, columns) milliseconds."""
        return Results(self.accuracy, self.latency_ms + added_ms, self.complexity)

    def violations(self, budgets_ms: Sequence[float]) -> NDArray[np.bool_]:
        """(samples, budgets), whether the latency is above the budget; the columns are the budgets."""
        return self.latency_ms > np.asarray(budgets_ms)

    @property
    def parts(self) -> tuple[NDArray[np.float64], ...]:
        """The three matrices."""
        return self.accuracy, self.latency_ms, self.complexity


@dataclass(frozen=True)
class Row:
    """A method at a budget, over all samples.

    Attributes:
        method: its name.
        budget_ms: milliseconds that an answer may take.
        accuracy: mean.
        latency_ms_mean: mean.
        latency_ms_p50: median.
        latency_ms_p95: 95th percentile.
        violation_rate: share of the samples whose latency is above the budget.
        complexity: mean share of the model that ran.
    """

    method: str
    budget_ms: float
    accuracy: float
    latency_ms_mean: float
    latency_ms_p50: float
    latency_ms_p95: float
    violation_rate: float
    complexity: float


def rows_of(method: str, results: Results, budgets_ms: Sequence[float]) -> list[Row]:
    """The rows of a method whose columns are the budgets."""
    rows = []
    late = results.violations(budgets_ms).mean(0)
    for place, budget in enumerate(budgets_ms):
        accuracy, latency, complexity = (part[:, place] for part in results.parts)
        times = [latency.mean(), *np.percentile(latency, [50, 95])]
        figures = [accuracy.mean(), *times, late[place], complexity.mean()]
        rows.append(Row(method, float(budget), *map(float, figures)))
    return rows
