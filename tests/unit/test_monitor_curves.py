"""How curves are processed before they are drawn."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from verl_ext import monitor
from verl_ext.metrics.jsonl import MetricsRow
from verl_ext.metrics.registry import ADAPTIVE_PREFIX, METRICS
from verl_ext.monitor.chart_options import (
    LEGEND_LINE_PX,
    ChartStyle,
    chart_options,
    comparison_options,
    rates_options,
)
from verl_ext.monitor.charts import CHARTS, Chart, charts_for, metric_hint, short_labels, unit_of
from verl_ext.monitor.curves import (
    MAX_POINTS,
    MAX_SEGMENTS,
    CurveEnvelope,
    RunCurves,
    ema,
    is_worth_smoothing,
    moving_average,
    smooth,
)
from verl_ext.monitor.flips import OUTCOMES
from verl_ext.monitor.page import PANELS, STATUS_BAR
from verl_ext.monitor.state import TABS
from verl_ext.monitor.text import CHINESE, translate


def test_short_curves_are_drawn_unchanged() -> None:
    envelope, rng = CurveEnvelope(), np.random.default_rng(0)
    values = rng.standard_normal(MAX_POINTS)
    envelope.add(np.arange(MAX_POINTS, dtype=float), values)
    x, drawn = envelope.points()
    assert x.tolist() == list(range(MAX_POINTS)) and drawn.tolist() == values.tolist()


@pytest.mark.parametrize("at_once", [1_000_000, 7, 4096])
def test_downsampling_keeps_peaks(at_once: int) -> None:
    count = 1_000_000 if at_once > 7 else 30_000
    values = np.random.default_rng(1).standard_normal(count)
    values[count // 3], values[count // 2] = 50.0, -60.0
    envelope = CurveEnvelope()
    for start in range(0, count, at_once):
        part = values[start : start + at_once]
        envelope.add(np.arange(start, start + len(part), dtype=float), part)
    x, drawn = envelope.points()
    assert MAX_SEGMENTS <= len(x) <= 2 * (MAX_SEGMENTS + 1) and (np.diff(x) >= 0).all()
    assert drawn.max() == 50.0 and x[drawn.argmax()] == count // 3
    assert drawn.min() == -60.0 and x[drawn.argmin()] == count // 2
    assert envelope.num_points == count and x[-1] >= count - count / 500
    middle, means = envelope.means()
    assert len(middle) <= MAX_SEGMENTS + 1 and abs(means.mean()) < 0.05  # of noise, nothing is left


def test_non_finite_values_are_not_drawn() -> None:
    envelope = CurveEnvelope()
    envelope.add(np.arange(4.0), np.array([1.0, np.nan, np.inf, 2.0]))
    assert envelope.points()[1].tolist() == [1.0, 2.0] and envelope.num_points == 2


def test_line_is_interrupted_where_values_are_not_finite() -> None:
    """Also if the rows arrive in parts and the curves are saved in between; each part is smoothed on its own."""
    values = np.array([9.0] * 20 + [np.nan] * 5 + [1.0] * 20 + [np.inf] * 3)
    curves = RunCurves()
    for steps in np.split(np.arange(len(values)), [22, 46]):
        curves.add([MetricsRow(step, 1, 1.0, {"train/loss": values[step]}) for step in steps.tolist()], {})
        curves = RunCurves.load(*curves.dump())
    assert curves.gaps == {"train/loss": [20.0, 45.0]} and curves.latest == {"train/loss": np.inf}
    loss = charts_for(curves.envelopes)[0]
    expected = [(step, 9.0) for step in range(20)] + [(20, None)] + [(step, 1.0) for step in range(25, 45)]
    for smoothing in (0.0, 0.9):
        for line in chart_options(curves, loss, ChartStyle(smoothing))["series"]:
            assert list(line["data"]) == expected and not line["showSymbol"]
    assert chart_options(curves, loss, ChartStyle(0.0, log_scale=True))["yAxis"]["type"] == "log"


def test_values_between_gaps_are_visible_and_gaps_are_bounded() -> None:
    curves = RunCurves()
    for start in range(0, 10_000, 1000):
        steps = range(start, start + 1000)
        curves.add([MetricsRow(step, 1, 1.0, {"train/loss": np.nan if step % 2 else 1.0}) for step in steps], {})
        if start == 0:
            [line] = chart_options(curves, charts_for(curves.envelopes)[0], ChartStyle(0.0))["series"]
            assert line["showSymbol"] and len(line["data"]) == 999
    assert len(curves.gaps["train/loss"]) <= MAX_SEGMENTS


@pytest.mark.parametrize("epoch", [1e-320, 1e-8])
def test_tiny_epoch_value_is_ignored(epoch: float) -> None:
    curves = RunCurves()
    curves.add([MetricsRow(1 << 50, 1, 1.0, {"train/loss": 1.0, "train/epoch": epoch})], {})
    assert curves.steps_per_epoch is None and RunCurves.load(*curves.dump()).step == 1 << 50


def test_memory_of_curve_is_bounded() -> None:
    envelope = CurveEnvelope()
    for start in range(0, 2_000_000, 50_000):
        envelope.add(np.arange(start, start + 50_000.0), np.ones(50_000))
    assert envelope.segments.nbytes + envelope.pending.nbytes < 1_000_000


def test_smoothing_matches_definitions() -> None:
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


def test_segments_are_equal_parts_in_order() -> None:
    envelope, count = CurveEnvelope(), 3 * MAX_POINTS
    envelope.add(np.arange(count, dtype=float), np.arange(count, dtype=float))
    size = envelope.size
    assert size > 1 and envelope.segments[:, 5].tolist() == [size] * len(envelope.segments)
    x, means = envelope.means()
    whole = len(envelope.segments)
    assert means[:whole].tolist() == [(size - 1) / 2 + size * number for number in range(whole)] == x[:whole].tolist()


def rows_of(attempt: int, first: int, last: int, seconds: float = 1.0) -> list[MetricsRow]:
    return [MetricsRow(step, attempt, step * seconds, {"train/loss": step}) for step in range(first, last + 1)]


def test_restarts_continue_at_end_of_axis() -> None:
    curves, first_steps = RunCurves(), {1: 0, 2: 20, 4: 31}
    curves.add(rows_of(1, 1, 30), first_steps)
    curves.add(rows_of(2, 21, 25), first_steps)
    curves.add(rows_of(2, 26, 40), first_steps)
    curves.add(rows_of(3, 1, 5), first_steps)  # of which only the rows are known
    curves.add(rows_of(4, 32, 33), first_steps)
    assert curves.starts == {1: 0, 2: 30, 3: 50, 4: 55} and curves.offsets == {1: 0, 2: 10, 3: 50, 4: 24}
    assert curves.envelopes["train/loss"].points()[0].tolist() == [*range(1, 58)]
    again = RunCurves.load(*curves.dump())
    again.add(rows_of(4, 34, 34), first_steps)
    assert again.envelopes["train/loss"].points()[0].tolist() == [*range(1, 59)] and again.step == 34


def test_comparison_aligns_restarted_runs_by_step() -> None:
    """Of a repeated step, the last attempt counts; steps behind that from which an attempt resumed are lost."""
    first_steps = {1: 0, 2: 20, 3: 25}
    restarted, straight = RunCurves(), RunCurves()
    for attempt, first, last in ((1, 1, 50), (2, 21, 40), (3, 26, 60)):
        restarted.add(
            [row._replace(metrics={"train/loss": 100 * attempt + row.step}) for row in rows_of(attempt, first, last)],
            first_steps,
        )
    straight.add(rows_of(1, 1, 60), {})
    runs = {"restarted": restarted, "straight": straight}
    for smoothing in (0.0, 0.6):
        options = comparison_options(runs, "train/loss", ChartStyle(smoothing), {})
        lines = options["series"]
        assert [[step for step, _ in line["data"]] for line in lines] == [[*range(1, 61)]] * len(lines)
        assert (options["xAxis"]["min"], options["xAxis"]["max"], options["xAxis"]["name"]) == (1, 60, "step")
    raw = [value for _, value in comparison_options(runs, "train/loss", ChartStyle(0.0), {})["series"][0]["data"]]
    assert raw == [*range(101, 121), *range(221, 226), *range(326, 361)]
    steps = np.array([1.0, 20.0, 21.0, 25.0, 26.0, 60.0])
    places = restarted.to_places(steps)
    assert restarted.without_lost_steps(places, places)[0].tolist() == steps.tolist()
    by_time = comparison_options(runs, "train/loss", ChartStyle(0.0, axis="time"), {})
    assert len(by_time["series"][0]["data"]) == 50 + 20 + 35


def test_tooltip_shows_step_and_attempt_of_restarted_run() -> None:
    curves = RunCurves()
    curves.add(rows_of(1, 1, 30), {1: 0, 2: 20})
    loss = charts_for(curves.envelopes)[0]
    assert ":formatter" not in chart_options(curves, loss, ChartStyle(0.0))["xAxis"]["axisPointer"]["label"]
    curves.add(rows_of(2, 21, 25), {1: 0, 2: 20})
    axis = chart_options(curves, loss, ChartStyle(0.0))["xAxis"]
    assert '[[0,0,"attempt 1"],[30,10,"attempt 2"]]' in axis["axisPointer"]["label"][":formatter"]
    assert axis["name"] == "step over all attempts"
    assert chart_options(curves, loss, ChartStyle(0.0, axis="time"))["xAxis"]["name"] == "minutes"


@pytest.mark.parametrize("num_steps", [1, MAX_POINTS, MAX_POINTS + 3])
def test_saved_curves_are_restored_and_small(num_steps: int) -> None:
    curves = RunCurves()
    curves.add(rows_of(1, 1, num_steps), {})
    state, blobs = curves.dump()
    again = RunCurves.load(state, blobs)
    for name, envelope in curves.envelopes.items():
        assert (again.envelopes[name].segments == envelope.segments).all()
        assert (again.envelopes[name].pending == envelope.pending).all()
    assert all(len(segments) + len(pending) <= 16 * num_steps for _, _, segments, pending in blobs)


def test_axis_without_lost_steps_equals_steps() -> None:
    curves = RunCurves()
    curves.add(rows_of(1, 1, 30), {1: 0, 2: 30})
    curves.add(rows_of(2, 31, 60), {1: 0, 2: 30})
    assert curves.envelopes["train/loss"].points()[0].tolist() == [*range(1, 61)]


def test_time_left_uses_recent_speed() -> None:
    curves = RunCurves()
    assert curves.seconds_left(120) is None and curves.step == 0
    curves.add(rows_of(1, 1, 500, seconds=9.0), {})
    curves.add([MetricsRow(step, 1, 9.0 * 500 + 2.0 * (step - 500), {"train/loss": 1}) for step in range(501, 560)], {})
    assert curves.seconds_left(659) == 200.0 and curves.seconds_left(15) == 0.0 and curves.seconds_left(None) is None
    curves.add([MetricsRow(1, 2, 1e6, {"train/loss": 1})], {})
    assert curves.seconds_left(100) is None  # of an attempt of one step
    curves.add([MetricsRow(2, 2, 1e6, {"train/loss": 1})], {})
    assert curves.seconds_left(100) is None  # in no time


def test_charts_depend_on_logged_metrics() -> None:
    sft = ["train/loss", "train/perplexity", "train/grad_norm", "train/lr(1e-3)", "val/loss"]
    names = [chart.name for chart in charts_for(sft)]
    assert names == ["Loss", "Perplexity", "Gradient norm", "Learning rate and its schedule", "Evaluation loss"]
    grpo = ["train/loss", "train/reward_total_mean", "train/code_tests_mean", "train/adv_mean", "train/my_own_mean"]
    [functions] = [chart for chart in charts_for(grpo) if chart.name == "Reward by function"]
    assert functions.metrics == ("train/code_tests_mean", "train/my_own_mean")
    assert "Evaluation loss" not in [chart.name for chart in charts_for(["train/loss"])]


def test_curves_beyond_the_last_color_differ_by_their_dashes() -> None:
    curves, names = RunCurves(), tuple(f"train/reward_{number}_mean" for number in range(25))
    curves.add([MetricsRow(step, 1, 1.0, dict.fromkeys(names, 1.0)) for step in range(1, 101)], {})
    chart = Chart("Rewards", "", "", "", names)
    rates = {name: {1: (0.5, 0.4, 0.6)} for name in names}
    runs = dict.fromkeys(names, curves)
    for options in (
        chart_options(curves, chart, ChartStyle(0.0)),
        chart_options(curves, chart, ChartStyle(0.9)),
        comparison_options(runs, names[0], ChartStyle(0.0), {}),
        rates_options(rates, None, ChartStyle(0.0)),
    ):
        drawn = [line for line in options["series"] if "opacity" not in line["lineStyle"]]
        assert [line["name"] for line in drawn] == [*names]
        assert len({(line["itemStyle"]["color"], line["lineStyle"]["type"]) for line in drawn}) == len(names)


def test_every_chart_has_hint_in_both_languages() -> None:
    for chart in CHARTS:
        (title, hint), (title_zh, hint_zh) = chart.texts("en"), chart.texts("zh")
        assert title.isascii() and hint.isascii() and not title_zh.isascii(), chart.name
        assert len(hint) > 60 and "理想趋势" in hint_zh, chart.name


def test_every_chart_has_one_unit_and_names_its_axes() -> None:
    curves = RunCurves()
    names = {name for chart in CHARTS for name in chart.metrics} | {"train/code_tests_mean"}
    curves.add([MetricsRow(1, 1, 1.0, dict.fromkeys(names, 1.0))], {})
    for chart in charts_for(curves.envelopes):
        assert len({unit_of(name) for name in chart.metrics}) == 1, chart.name
        for language in ("en", "zh"):
            options = chart_options(curves, chart, ChartStyle(0.0, language))
            unit = translate(language, "no unit" if chart.unit == "1" else chart.unit)
            assert options["xAxis"]["name"] == translate(language, "step") and options["yAxis"]["name"] == unit
            assert options["legend"]["type"] == "plain" and options["legend"]["data"] == [*chart.metrics]
    assert {chart.name: chart.unit for chart in CHARTS[:2]} == {"Loss": "nat/token", "Perplexity": "1"}
    assert metric_hint("val/loss", "zh") == CHARTS[0].hint_zh and metric_hint("train/kl", "en").startswith("KL")


@pytest.mark.parametrize(
    ("metrics", "labels"),
    [
        (["train/grad_norm"], ["train"]),
        (["train/loss", "val/loss"], ["train", "validation"]),
        (["train/adv_mean", "train/adv_min"], ["mean", "min"]),
        (["train/latency_ms_mean", "eval/latency_ms_mean", "train/budget_ms_mean"],
         ["latency, train", "latency, validation", "budget, train"]),
        (["system/peak_memory_gib", "system/disk_free_gib"], ["peak memory", "disk free"]),
        (["train/time(s)", "time/train/step_s"], ["time(s)", "step s"]),
        (["a/b", "c/b"], ["a/b", "c/b"]),
        (["train/code_tests_mean"], ["code tests mean"]),
    ],
)  # fmt: skip
def test_legend_shows_what_differs_among_metrics(metrics: list[str], labels: list[str]) -> None:
    assert short_labels(metrics, "en") == dict(zip(metrics, labels))


def test_validations_are_markers_in_chart_of_training_loss() -> None:
    curves = RunCurves()
    curves.add([MetricsRow(step, 1, 1.0, {"train/loss": step, "val/loss": step}) for step in range(1, 50)], {})
    train, raw, validation = chart_options(curves, CHARTS[0], ChartStyle(0.9))["series"]
    assert (train["name"], raw["name"], validation["name"]) == ("train/loss", "train/loss", "val/loss")
    assert train["data"] != raw["data"] == validation["data"] and validation["showSymbol"] and not raw["showSymbol"]


def test_confidence_bands_enclose_rates() -> None:
    rates = {"accepted_at_1": {10: (0.5, 0.25, 0.75), 20: (0.5, 0.5, 0.5)}, "timeout_rate": {20: (0.0, 0.0, 0.0)}}
    options = rates_options(rates, None, ChartStyle(0.0))
    assert options["series"][1]["data"] == [[20, 0.0]]
    assert options["series"][2]["data"] == [[10, 0.75], [20, 0.5], [20, 0.5], [10, 0.25]]
    assert "95%" in options["yAxis"]["name"]


def test_every_metric_of_a_run_has_meaning_in_both_languages() -> None:
    others = (ADAPTIVE_PREFIX, "Train/", "Val/")  # of other commands, and of TensorBoard only
    for metric in METRICS:
        if not metric.startswith(others):
            assert metric_hint(metric, "en").isprintable() and metric_hint(metric, "zh") != metric_hint(metric, "en"), (
                metric
            )


def test_every_label_has_translation() -> None:
    assert tuple(PANELS) == TABS
    for word in [*TABS, *STATUS_BAR, *STATUS_BAR.values()]:
        assert word in CHINESE and translate("zh", word) == CHINESE[word] and translate("en", word) == word


def test_every_literal_text_has_translation() -> None:
    """Of calls such as `self.say("Nothing yet")`."""
    calls = re.compile(r"""\b(?:_?say|translate)\(["']([^"']+)["']\)""")
    texts = {text for path in Path(monitor.__file__).parent.glob("*.py") for text in calls.findall(path.read_text())}
    assert len(texts) > 40 and texts <= CHINESE.keys()
    assert {*OUTCOMES, *OUTCOMES.values()} <= CHINESE.keys()


def test_legend_of_long_names_has_one_line_per_run() -> None:
    long = {f"{letter}{'x' * 60}{letter}": RunCurves() for letter in "abcdefghij"}
    legends = [comparison_options(runs, "train/loss", ChartStyle(0.0), {}) for runs in ({"a": RunCurves()}, long)]
    below = [options["grid"]["bottom"] for options in legends]
    assert below[1] - below[0] == 9 * LEGEND_LINE_PX
    label = f"a{'x' * 18}…{'x' * 17}a"
    assert label in legends[1]["legend"][":formatter"] and legends[1]["legend"]["data"] == [*long]


def test_log_axis_requires_positive_values() -> None:
    curves = RunCurves()
    curves.add([MetricsRow(1, 1, 1.0, {"train/loss": 2.0, "train/reward_total_mean": -1.0})], {})
    kinds = {
        chart.name: [
            chart_options(curves, chart, ChartStyle(0.0, log_scale=log))["yAxis"]["type"] for log in (False, True)
        ]
        for chart in charts_for(curves.envelopes)
    }
    assert kinds == {"Loss": ["value", "log"], "Rewards": ["value", "value"]}
