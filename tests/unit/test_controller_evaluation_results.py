"""Baselines and summary of a comparison, against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from verl_ext.controller.evaluation.results import (
    MethodAtBudget,
    ResultMatrices,
    closed_gap,
    lookup_table,
    mean_interval,
    method_rows,
    oracle,
    pareto_front,
    summarize_comparison,
)
from verl_ext.controller.evaluation.statics import important_blocks, static_grid
from verl_ext.controller.space import ConfigurationSpace, cheapest_configuration

SPACE = ConfigurationSpace(("low", "medium", "high"), 16, 12, 16, (4, 5, 6, 7, 8))


def results(accuracy: list[list[float]], latency_ms: list[list[float]]) -> ResultMatrices:
    """Matrices from lists (samples, columns)."""
    found = np.array(accuracy, dtype=float)
    return ResultMatrices(found, np.array(latency_ms, dtype=float), np.full_like(found, 0.5))


def test_static_grid_is_thinned_evenly_and_keeps_ends() -> None:
    first = important_blocks(SPACE, None)
    whole = static_grid(SPACE, first, 1000)
    assert len(whole) == len(set(whole)) == 3 * 5 * 5
    assert whole[0] == cheapest_configuration(SPACE, None) and whole[-1] == SPACE.full
    few = static_grid(SPACE, first, 36)
    assert len(set(few)) == 36 and {whole[0], whole[-1]} <= set(few)
    places = [whole.index(each) for each in few]
    assert set(np.diff(places)) == {2, 3}
    scores = {block: float(block) for block in range(1, 16)}
    kept = static_grid(SPACE, important_blocks(SPACE, scores), 36)[0].blocks
    assert [block for block, runs in enumerate(kept) if not runs] == [1, 2, 3, 4]
    one = ConfigurationSpace(("low",), 3, 1, 1, (2, 4))
    assert len(static_grid(one, important_blocks(one, None), 36)) == 1  # block 0 alone has its own top-k
    dense = ConfigurationSpace(("low", "high"), 3, 2, 3)
    assert len(static_grid(dense, important_blocks(dense, None), 36)) == 4


def test_pareto_front_has_only_undominated_points() -> None:
    accuracy, latency = [0.3, 0.5, 0.4, 0.5, 0.9, 0.3], [10, 20, 30, 20, 40, 10]
    assert pareto_front(results([accuracy], [latency])) == [0, 1, 4]
    assert pareto_front(results([[0.5, 0.5, 0.7]], [[9, 8, 8]])) == [2]


def test_lookup_table_allows_five_percent_violations() -> None:
    latency = np.full((20, 3), 10.0)
    latency[0, 1] = latency[:2, 2] = 30.0  # 5% and 10% exceed 20 ms
    accuracy = np.tile([0.2, 0.6, 1.0], (20, 1))
    train = ResultMatrices(accuracy, latency, accuracy)
    assert lookup_table(train, [5.0, 20.0, 40.0]) == [0, 1, 2]


def test_lookup_table_takes_fastest_on_tie_or_if_all_late() -> None:
    train = results([[0.5, 0.5, 0.1]] * 4, [[12, 11, 9]] * 4)
    assert lookup_table(train, [1.0, 20.0]) == [2, 1]


def test_oracle_takes_best_within_budget() -> None:
    candidates = results([[0.0, 1.0, 1.0, 0.3], [0.0, 0.0, 0.0, 1.0]], [[5, 30, 20, 10], [9, 8, 20, 40]])
    found = oracle(candidates, [4.0, 10.0, 25.0, 40.0])
    assert found.accuracy.tolist() == [[0.0, 0.3, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
    assert found.latency_ms.tolist() == [[5, 10, 20, 20], [8, 8, 8, 40]]
    assert found.violations([4.0, 10.0, 25.0, 40.0]).tolist() == [[True, False, False, False]] * 2


def test_method_row_aggregates_all_samples() -> None:
    [first, second] = method_rows("m", results([[0, 1], [1, 1], [0.5, 1]], [[10, 1], [20, 1], [60, 1]]), [20.0, 30.0])
    assert first == MethodAtBudget("m", 20.0, 0.5, 30.0, 20.0, pytest.approx(56.0), pytest.approx(1 / 3), 0.5)
    assert second.violation_rate == 0.0 and second.accuracy == 1.0


def test_comparison_summary_equals_hand_computation() -> None:
    budgets = [10.0, 20.0]
    methods = {
        "controller": results([[0.4, 1.0], [0.6, 1.0]], [[11, 15], [9, 15]]),
        "lookup_table": results([[0.2, 1.0], [0.4, 1.0]], [[1, 1], [1, 1]]),
        "oracle": results([[0.6, 1.0], [0.8, 1.0]], [[1, 1], [1, 1]]),
    }
    deciding = {"decision_ms": 3.0, "features_ms": 1.0, "network_ms": 0.5, "choice_ms": 0.2}
    found = summarize_comparison(methods, budgets, deciding, 200.0, 0.0)
    assert found.controller_minus_lookup_table == pytest.approx(0.1)
    assert found.interval == pytest.approx((0.1, 0.1))
    assert found.gap_closed == pytest.approx(0.5) and found.num_gap_budgets == 1
    assert (found.worst_violation_rate, found.worst_violation_budget_ms) == (0.5, 10.0)
    assert (found.decision_ms, found.network_share) == (3.0, 0.0025)


def test_gap_below_one_point_is_ignored() -> None:
    assert closed_gap(np.array([0.005, 0.0]), np.array([0.009, 0.0])) == (None, 0)
    share, count = closed_gap(np.array([0.005, -0.02, 5.0]), np.array([0.01, 0.04, 0.0]))
    assert share == pytest.approx(0.0) and count == 2


def test_mean_interval_needs_two_samples() -> None:
    assert mean_interval(np.array([0.5])) is None
    low, high = mean_interval(np.array([0.0, 1.0]))
    assert (low + high) / 2 == pytest.approx(0.5) and high - low == pytest.approx(2 * 12.7062 * 0.5, rel=1e-5)
