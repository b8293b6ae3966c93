"""Results of the methods as matrices, the choices of the baselines, and the summary; numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from eval_pipeline.report.metrics import CONFIDENCE, Interval
from verl_ext.controller.space import Configuration, ConfigurationSpace

ALLOWED_VIOLATIONS = 0.05
"""Maximum share of training questions on which an entry of the lookup table may exceed the budget."""
MIN_GAP = 0.01
"""Minimum accuracy gap between oracle and lookup table for which the closed share is meaningful: one point."""
DECISION_PARTS = ("decision_ms", "features_ms", "network_ms", "choice_ms")

Cell = tuple[float, float, float]
"""Accuracy from 0 to 1, latency in milliseconds, and complexity of a configuration on a sample."""


@dataclass(frozen=True)
class ResultMatrices:
    """Results by sample and column; columns are configurations or budgets.

    Attributes:
        accuracy: (samples, columns), from 0 to 1.
        latency_ms: (samples, columns).
        complexity: (samples, columns), share of the model that ran.
    """

    accuracy: NDArray[np.float64]
    latency_ms: NDArray[np.float64]
    complexity: NDArray[np.float64]

    @classmethod
    def from_cells(cls, rows: Sequence[Sequence[Cell]]) -> ResultMatrices:
        """Build the matrices from the cells of each sample."""
        return cls(*np.moveaxis(np.array(rows, dtype=float), -1, 0))

    def columns(self, chosen: Sequence[int]) -> ResultMatrices:
        """Select columns in the given order, possibly with repetitions."""
        return ResultMatrices(*(part[:, list(chosen)] for part in self.parts))

    def take(self, chosen: NDArray[np.int64]) -> ResultMatrices:
        """Select columns (samples, choices) separately for each sample."""
        return ResultMatrices(*(np.take_along_axis(part, chosen, axis=1) for part in self.parts))

    def concatenate(self, other: ResultMatrices) -> ResultMatrices:
        """Append the columns of `other`."""
        return ResultMatrices(*(np.concatenate(pair, axis=1) for pair in zip(self.parts, other.parts)))

    def violations(self, budgets_ms: Sequence[float]) -> NDArray[np.bool_]:
        """Whether each latency exceeds its budget, (samples, budgets); the columns must be the budgets."""
        return self.latency_ms > np.asarray(budgets_ms)

    @property
    def parts(self) -> tuple[NDArray[np.float64], ...]:
        """Accuracy, latency and complexity matrices, with a sample per row."""
        return self.accuracy, self.latency_ms, self.complexity


@dataclass(frozen=True)
class Measurements:
    """All runs of a comparison.

    Attributes:
        train: (training samples, static configurations).
        statics: (samples, static configurations), on held-out questions like the next four.
        chosen: (samples, budgets), the controller's choices without the decision time.
        deciding: (samples, budgets, 4), milliseconds by `DECISION_PARTS`.
        random: (samples, budgets), random configurations.
        full: (samples, 1), the full configuration.
        full_ms: mean measured latency of the full configuration, even if latencies come from a latency model.
        retries_per_run: number of repeated measurements per run, see `InterferenceDetector`.
        is_measured: whether latencies are measured; else, only `full_ms` and the parts of a decision are.
        sample_ids: ids of the held-out questions, (samples,).
        train_sample_ids: ids of the training questions, (training samples,).
        configurations: the controller's choices, (samples, budgets).
    """

    train: ResultMatrices
    statics: ResultMatrices
    chosen: ResultMatrices
    deciding: NDArray[np.float64]
    random: ResultMatrices
    full: ResultMatrices
    full_ms: float
    retries_per_run: float
    is_measured: bool
    sample_ids: Sequence[str]
    train_sample_ids: Sequence[str]
    configurations: Sequence[Sequence[Configuration]]


# The choices of the baselines


def pareto_front(results: ResultMatrices) -> list[int]:
    """Columns on the Pareto front of mean accuracy and mean latency, fastest first."""
    accuracy, latency = results.accuracy.mean(0), results.latency_ms.mean(0)
    front: list[int] = []
    for column in np.lexsort((-accuracy, latency)).tolist():
        if not front or accuracy[column] > accuracy[front[-1]]:
            front.append(column)
    return front


def lookup_table(train: ResultMatrices, budgets_ms: Sequence[float]) -> list[int]:
    """The best column on training questions for each budget.

    This is the column with the highest mean accuracy among columns with a violation rate of at most
    `ALLOWED_VIOLATIONS`; the lower mean latency wins a tie. Without such a column, it is the one with the lowest mean
    latency.

    Args:
        train: (training samples, configurations).
    """
    accuracy, latency = train.accuracy.mean(0), train.latency_ms.mean(0)
    table = []
    for budget in budgets_ms:
        rates = (train.latency_ms > budget).mean(0)
        allowed = np.flatnonzero(rates <= ALLOWED_VIOLATIONS)
        best = min(allowed, key=lambda column: (-accuracy[column], latency[column]), default=latency.argmin())
        table.append(int(best))
    return table


def oracle(candidates: ResultMatrices, budgets_ms: Sequence[float]) -> ResultMatrices:
    """The most accurate result within the budget for each sample and budget; the faster one wins a tie.

    If no result is within the budget, the fastest of all.

    Args:
        candidates: (samples, configurations).
        budgets_ms: (budgets,), the columns of the result.
    """
    by_latency = candidates.take(candidates.latency_ms.argsort(axis=1, kind="stable"))
    # argmax returns the first maximum, which is the fastest; with none within the budget, the fastest of all
    fits = [by_latency.latency_ms <= budget for budget in budgets_ms]
    chosen = [np.where(fit, by_latency.accuracy, -1.0).argmax(axis=1) for fit in fits]
    return by_latency.take(np.stack(chosen, axis=1))


# Means and the summary


@dataclass(frozen=True)
class MethodAtBudget:
    """A method at a budget: means over all samples, and percentiles of the latency.

    Attributes:
        violation_rate: share of the samples whose latency exceeds the budget.
        complexity: share of the model that ran.
    """

    method: str
    budget_ms: float
    accuracy: float
    latency_ms_mean: float
    latency_ms_p50: float
    latency_ms_p95: float
    violation_rate: float
    complexity: float


def method_rows(method: str, results: ResultMatrices, budgets_ms: Sequence[float]) -> list[MethodAtBudget]:
    """The rows of a method whose result columns are the budgets."""
    rows = []
    violations = results.violations(budgets_ms).mean(0)
    for column, budget in enumerate(budgets_ms):
        accuracy, latency, complexity = (part[:, column] for part in results.parts)
        times = [latency.mean(), *np.percentile(latency, [50, 95])]
        values = [accuracy.mean(), *times, violations[column], complexity.mean()]
        rows.append(MethodAtBudget(method, float(budget), *map(float, values)))
    return rows


@dataclass(frozen=True)
class ComparisonSummary:
    """The result of a comparison; accuracies are from 0 to 1.

    Attributes:
        controller_minus_lookup_table: difference in accuracy, mean over budgets.
        interval: 95% confidence interval of that difference over questions; None with a single question.
        gap_closed: share of the gap between oracle and lookup table that the controller closes, mean over the budgets
            with a gap of at least `MIN_GAP`; None without such budgets.
        num_gap_budgets: number of these budgets.
        worst_violation_rate: the controller's highest violation rate over the budgets.
        decision_ms: mean time that a decision adds to the latency; the next three are its measured parts, see
            `Decision`.
        full_ms: mean measured latency of the full configuration.
        network_share: `network_ms` / `full_ms`.
        retries_per_run: number of repeated measurements per run.
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
    retries_per_run: float


def summarize_comparison(
    methods: Mapping[str, ResultMatrices],
    budgets_ms: Sequence[float],
    deciding: Mapping[str, float],
    full_ms: float,
    retries_per_run: float,
) -> ComparisonSummary:
    """Compare the controller with the lookup table and the oracle.

    Args:
        methods: results (samples, budgets) of `controller`, `lookup_table` and `oracle`.
        deciding: mean milliseconds by `DECISION_PARTS`.
    """
    controller, table = methods["controller"], methods["lookup_table"]
    violations = controller.violations(budgets_ms).mean(0)
    gains = controller.accuracy - table.accuracy
    gap_closed, num_gaps = closed_gap(gains.mean(0), (methods["oracle"].accuracy - table.accuracy).mean(0))
    return ComparisonSummary(
        float(gains.mean()),
        mean_interval(gains.mean(1)),
        gap_closed,
        num_gaps,
        float(violations.max()),
        float(budgets_ms[int(violations.argmax())]),
        **deciding,
        full_ms=full_ms,
        network_share=deciding["network_ms"] / full_ms,
        retries_per_run=retries_per_run,
    )


def closed_gap(gains: NDArray[np.float64], gaps: NDArray[np.float64]) -> tuple[float | None, int]:
    """The mean of gain / gap over the gaps of at least `MIN_GAP`, and their number.

    Args:
        gains: (budgets,), accuracy of the controller minus accuracy of the lookup table.
        gaps: (budgets,), accuracy of the oracle minus accuracy of the lookup table.
    """
    wide = gaps >= MIN_GAP - 1e-9  # tolerates rounding of a gap of exactly one point
    return (float((gains[wide] / gaps[wide]).mean()), int(wide.sum())) if wide.any() else (None, 0)


def mean_interval(values: NDArray[np.float64]) -> Interval | None:
    """Student's confidence interval of the mean of values (samples,); None with fewer than two."""
    if len(values) < 2:
        return None
    half = float(t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    return float(values.mean()) - half, float(values.mean()) + half


@dataclass(frozen=True)
class ControllerComparison:
    """The controller and its baselines.

    Attributes:
        budgets_ms: budgets, ascending.
        statics: static configurations, the columns of `measured.statics` and `measured.train`.
        methods: results (samples, budgets) by method name.
        front: Pareto front as indices into `statics`, fastest first.
        table: lookup table as indices into `statics`, one per budget.
    """

    space: ConfigurationSpace
    budgets_ms: Sequence[float]
    statics: Sequence[Configuration]
    measured: Measurements
    methods: dict[str, ResultMatrices]
    front: list[int]
    table: list[int]
    summary: ComparisonSummary

    @property
    def rows(self) -> list[MethodAtBudget]:
        """A row for each method and budget."""
        return [row for name, results in self.methods.items() for row in method_rows(name, results, self.budgets_ms)]

    def violation_rates(self, method: str) -> NDArray[np.float64]:
        """Share of a method's answers that exceed the budget, (budgets,)."""
        return self.methods[method].violations(self.budgets_ms).mean(0)


def compare(
    measured: Measurements, space: ConfigurationSpace, statics: Sequence[Configuration], budgets_ms: Sequence[float]
) -> ControllerComparison:
    """Compute the results of the methods and the summary.

    Args:
        statics: configurations of the columns of `measured.statics`.
        budgets_ms: budgets of the columns of `measured.chosen`.
    """
    table, chosen = lookup_table(measured.train, budgets_ms), measured.chosen
    # The oracle makes no decision, so the controller's choices are candidates without the decision time.
    methods = {
        "controller": replace(chosen, latency_ms=chosen.latency_ms + measured.deciding[..., 0]),
        "lookup_table": measured.statics.columns(table),
        "oracle": oracle(measured.statics.concatenate(chosen), budgets_ms),
        "random": measured.random,
        "full": measured.full.columns([0] * len(budgets_ms)),
    }
    deciding = dict(zip(DECISION_PARTS, measured.deciding.mean((0, 1)).tolist()))
    summary = summarize_comparison(methods, budgets_ms, deciding, measured.full_ms, measured.retries_per_run)
    front = pareto_front(measured.statics)
    return ControllerComparison(space, budgets_ms, statics, measured, methods, front, table, summary)
