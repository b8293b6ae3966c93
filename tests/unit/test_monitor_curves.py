"""What becomes of curves before they are drawn."""

from __future__ import annotations

import numpy as np
import pytest

from verl_ext.monitor.charts import charts_for
from verl_ext.monitor.curves.axis import CumulativeAxis
from verl_ext.monitor.curves.left import seconds_left, steps_per_second
from verl_ext.monitor.curves.overview import MOST_POINTS, Overview
from verl_ext.monitor.curves.smooth import ema, is_worth_smoothing, moving_average, smooth
from verl_ext.monitor.text import CHINESE, words


def test_few_points_are_drawn_as_they_are() -> None:
    overview, rng = Overview(), np.random.default_rng(0)
    values = rng.standard_normal(MOST_POINTS)
    overview.add(np.arange(MOST_POINTS, dtype=float), values)
    x, drawn = overview.points()
    assert x.tolist() == list(range(MOST_POINTS)) and drawn.tolist() == values.tolist()


@pytest.mark.parametrize("at_once", [1_000_000, 7, 4096])
def test_peaks_of_a_long_curve_survive_in_few_points(at_once: int) -> None:
    count = 1_000_000 if at_once > 7 else 30_000
    values = np.random.default_rng(1).standard_normal(count)
    values[count // 3], values[count // 2] = 50.0, -60.0
    overview = Overview()
    for start in range(0, count, at_once):
        part = values[start : start + at_once]
        overview.add(np.arange(start, start + len(part), dtype=float), part)
    x, drawn = overview.points()
    assert MOST_POINTS // 4 <= len(x) <= MOST_POINTS and (np.diff(x) >= 0).all()
    assert drawn.max() == 50.0 and x[drawn.argmax()] == count // 3
    assert drawn.min() == -60.0 and x[drawn.argmin()] == count // 2
    assert overview.num_points == count and overview.last == (count - 1, values[-1]) and x[-1] >= count - count / 500
    middle, means = overview.means()
    assert len(middle) <= MOST_POINTS // 2 + 1 and abs(means.mean()) < 0.05  # of noise, nothing is left


def test_values_that_are_no_numbers_are_not_drawn() -> None:
    overview = Overview()
    overview.add(np.arange(4.0), np.array([1.0, np.nan, np.inf, 2.0]))
    assert overview.points()[1].tolist() == [1.0, 2.0] and overview.num_points == 4


def test_memory_does_not_grow() -> None:
    overview = Overview()
    for start in range(0, 2_000_000, 50_000):
        overview.add(np.arange(start, start + 50_000.0), np.ones(50_000))
    assert overview._parts.nbytes + overview._open.nbytes < 1_000_000


def test_smoothing_follows_its_definitions() -> None:
    values = np.random.default_rng(2).standard_normal(200)
    past, expected = 0.0, []
    for place, value in enumerate(values, start=1):
        past = 0.9 * past + 0.1 * value
        expected.append(past / (1 - 0.9**place))
    assert np.allclose(ema(values, 0.9), expected) and ema(values, 0) is values
    averaged = moving_average(values, 5)
    assert np.isclose(averaged[100], values[98:103].mean()) and np.isclose(averaged[0], values[:3].mean())
    assert np.isclose(averaged[-1], values[-3:].mean()) and moving_average(values, 1) is values
    assert np.allclose(smooth(np.full(50, 3.0), 0.95), 3.0) and smooth(values, 0.9).std() < 0.5 * values.std()
    assert len(smooth(np.empty(0), 0.9)) == 0
    assert is_worth_smoothing(1000, 0.5) and not is_worth_smoothing(9, 0.5) and not is_worth_smoothing(1000, 0)


def test_restarts_go_on_where_the_axis_ends() -> None:
    axis = CumulativeAxis({1: 0, 2: 20, 4: 31})
    axis.learn(1, 1, 30)
    axis.learn(2, 21, 25)
    axis.learn(2, 26, 40)
    axis.learn(3, 1, 5)  # of which nothing is known but its rows
    axis.learn(4, 32, 33)
    attempts, steps = np.array([1, 1, 2, 2, 3, 4]), np.array([1, 30, 21, 40, 1, 32])
    assert axis.at(attempts, steps).tolist() == [1, 30, 31, 50, 51, 56]
    assert axis.starts == {1: 0, 2: 30, 3: 50, 4: 55}


def test_an_axis_without_a_lost_step_is_that_of_the_steps() -> None:
    axis = CumulativeAxis({1: 0, 2: 30})
    axis.learn(1, 1, 30)
    axis.learn(2, 31, 60)
    assert axis.at(np.array([2]), np.array([45])).tolist() == [45.0]


def test_the_time_left_is_by_the_recent_speed() -> None:
    recent = [(10, 100.0), (15, 110.0), (20, 120.0)]
    assert steps_per_second(recent) == 0.5 and seconds_left(recent, 120) == 200.0
    assert seconds_left(recent, 15) == 0.0 and seconds_left(recent, None) is None
    assert steps_per_second(recent[:1]) is None and steps_per_second([(3, 1.0), (3, 2.0)]) is None


def test_a_run_has_the_charts_of_its_metrics() -> None:
    sft = ["train/loss", "train/perplexity", "train/grad_norm", "train/lr(1e-3)", "val/loss"]
    names = [chart.name for chart in charts_for(sft)]
    assert names == ["Loss", "Perplexity", "Gradient norm", "Learning rate and its schedule", "Evaluation loss"]
    grpo = ["train/loss", "train/reward_total_mean", "train/code_tests_mean", "train/adv_mean", "train/my_own_mean"]
    [functions] = [chart for chart in charts_for(grpo) if chart.name == "Reward by function"]
    assert functions.metrics == ("train/code_tests_mean", "train/my_own_mean")
    assert "Evaluation loss" not in [chart.name for chart in charts_for(["train/loss"])]


def test_every_chart_has_a_chinese_name() -> None:
    from verl_ext.monitor.charts import CHARTS
    from verl_ext.monitor.page.main import PANELS

    for name in [*(chart.name for chart in CHARTS), *PANELS, "Reward by function"]:
        assert name in CHINESE and words("zh", name) == CHINESE[name] and words("en", name) == name
