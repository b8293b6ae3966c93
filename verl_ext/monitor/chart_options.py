"""The ECharts options of each kind of chart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from verl_ext.health.trend import Array
from verl_ext.monitor.charts import Chart, is_validation, short_labels, unit_of
from verl_ext.monitor.colors import ERRORS, GREEN, GREY, INK, RED, SERIES
from verl_ext.monitor.curves import CurveEnvelope, RunCurves, is_worth_smoothing, smooth
from verl_ext.monitor.text import translate

FAINT = 0.25
"""Opacity of the raw curve behind the smoothed one, and of a confidence band."""
LEGEND_LINE_PX = 18
NARROW_PX = 320
"""Width of the narrowest chart, on a phone."""
LABEL_PX, ENTRY_PX = 7, 28
"""Estimated width of a legend entry: per character of the label, and of marker and gap."""
CONFIDENCE = "shaded: 95 % confidence interval"


@dataclass(frozen=True)
class ChartStyle:
    """How charts are drawn; see the attributes of `PageState`."""

    smoothing: float
    language: str = "en"
    dark: bool = False
    log_scale: bool = False

    def say(self, text: str) -> str:
        """Translate a text."""
        return translate(self.language, text)


def chart_options(
    curves: RunCurves, chart: Chart, style: ChartStyle, schedule: Sequence[tuple[int, float]] = ()
) -> dict[str, Any]:
    """Return one chart of one run; the caller holds the curves' lock, and `schedule` is from `schedule_points`."""
    weight = 0.0 if chart.with_schedule else style.smoothing
    series = [
        line
        for metric, color in zip(chart.metrics, SERIES)
        for line in _lines(curves.envelopes[metric], metric, metric, color, weight, chart.scale)
    ]
    labels = short_labels(chart.metrics, style.language)
    if chart.with_schedule and schedule:
        name = style.say("schedule")
        labels[name] = name
        dashed = {"type": "dashed", "width": 1.5, "color": GREY}
        series.append({**_line(name, GREY), "lineStyle": dashed, "data": [list(point) for point in schedule]})
    series[0]["markLine"] = {"silent": True, "symbol": "none", "data": _marks(curves, chart, style)}
    return _curve_options(series, labels, chart.unit, style)


def comparison_options(runs: Mapping[str, RunCurves], metric: str, style: ChartStyle) -> dict[str, Any]:
    """Return a chart of one metric of several runs; the keys of `runs` are names in the legend."""
    series: list[dict[str, Any]] = []
    for (name, curves), color in zip(runs.items(), SERIES):
        with curves.lock:
            if metric in curves.envelopes:
                series += _lines(curves.envelopes[metric], metric, name, color, style.smoothing)
    return _curve_options(series, {name: name for name in runs}, unit_of(metric), style)


def _curve_options(
    series: list[dict[str, Any]], labels: Mapping[str, str], unit: str, style: ChartStyle
) -> dict[str, Any]:
    options = _options(series, labels, style, unit_text(unit, style.language))
    if style.log_scale and all(value > 0 for line in series for _, value in line["data"]):
        options["yAxis"]["type"] = "log"
    return options


def unit_text(unit: str, language: str) -> str:
    """Return a unit as the name of an axis."""
    return translate(language, "no unit" if unit == "1" else unit)


def rates_options(
    steps: Sequence[int],
    rates: Mapping[str, Sequence[tuple[float, float, float]]],
    best: int | None,
    style: ChartStyle,
) -> dict[str, Any]:
    """Return a chart of the rates of evaluated checkpoints, with confidence bands.

    Args:
        steps: steps of the checkpoints, ascending.
        rates: by name, the rate and its bounds for each step.
        best: step of the best checkpoint.
        style: language and colors.
    """
    series: list[dict[str, Any]] = []
    for (name, values), color in zip(rates.items(), SERIES):
        points = [[step, rate] for step, (rate, _, _) in zip(steps, values)]
        series.append({**_line(name, color), "data": points, "symbol": "circle", "symbolSize": 8, "showSymbol": True})
    has_bands = any(low < high for values in rates.values() for _, low, high in values)
    if has_bands:
        series += [_band(name, steps, values, color) for (name, values), color in zip(rates.items(), SERIES)]
    if best is not None and series:
        mark = {"xAxis": best, "lineStyle": {"color": GREEN}, "label": {"formatter": "★", "color": INK[style.dark]}}
        series[0]["markLine"] = {"silent": True, "symbol": "none", "data": [mark]}
    unit = unit_text("1", style.language) + (f" · {style.say(CONFIDENCE)}" if has_bands else "")
    options = _options(series, short_labels([*rates], style.language), style, unit)
    options["yAxis"] |= {"min": 0, "max": 1}
    return options


def _band(name: str, steps: Sequence[int], values: Sequence[tuple[float, float, float]], color: str) -> dict[str, Any]:
    """Return the area between the bounds of a rate: a line along the upper bounds and back along the lower ones."""
    upper = [[step, high] for step, (_, _, high) in zip(steps, values)]
    lower = [[step, low] for step, (_, low, _) in zip(steps, values)]
    hidden = {"lineStyle": {"opacity": 0}, "showSymbol": False, "tooltip": {"show": False}, "silent": True, "z": 1}
    area = {"color": color, "opacity": FAINT}
    return {**_line(name, color), **hidden, "areaStyle": area, "data": upper + lower[::-1]}


def errors_options(steps: Sequence[int], shares: Mapping[str, Sequence[float]], style: ChartStyle) -> dict[str, Any]:
    """Return a chart of the error types of each checkpoint's answers, as stacked bars."""
    series = [
        {"name": name, "type": "bar", "stack": "all", "data": list(values), "itemStyle": {"color": ERRORS[name]}}
        for name, values in shares.items()
    ]
    labels = {name: name.replace("_", " ") for name in shares}
    options = _options(series, labels, style, unit_text("1", style.language))
    options["xAxis"] |= {"type": "category", "data": [str(step) for step in steps]}
    options["yAxis"] |= {"min": 0, "max": 1}
    del options["dataZoom"], options["toolbox"]["feature"]["dataZoom"], options["toolbox"]["feature"]["restore"]
    return options


def _lines(
    envelope: CurveEnvelope, metric: str, name: str, color: str, smoothing: float, scale: float = 1.0
) -> list[dict[str, Any]]:
    """Return the curve, or the smoothed curve and a faint raw curve behind it; validations have markers instead."""
    x, values = envelope.points()
    line = _line(name, color)
    raw = {**line, "data": _pairs(x, values * scale), "lineStyle": {"width": 1.5}, "showSymbol": len(values) == 1}
    if is_validation(metric):
        return [{**raw, "showSymbol": True, "symbol": "circle", "symbolSize": 6}]
    if not is_worth_smoothing(len(values), smoothing):
        return [raw]
    faint = {"lineStyle": {"width": 1, "opacity": FAINT}, "tooltip": {"show": False}, "silent": True, "z": 1}
    x, values = envelope.means()
    smoothed = _pairs(x, smooth(values, smoothing) * scale)
    return [{**line, "data": smoothed, "lineStyle": {"width": 2}}, {**raw, **faint}]


def _line(name: str, color: str) -> dict[str, Any]:
    return {"name": name, "type": "line", "showSymbol": False, "itemStyle": {"color": color}}


def _marks(curves: RunCurves, chart: Chart, style: ChartStyle) -> list[dict[str, Any]]:
    """Return marks of the starts of attempts, and the chart's own line."""
    marks: list[dict[str, Any]] = []
    for attempt, place in [*curves.starts.items()][1:]:
        text = style.say("attempt {}").format(attempt)
        label = {"formatter": text, "color": INK[style.dark], "fontSize": 11}
        marks.append({"xAxis": place, "lineStyle": {"color": GREY, "type": "dotted"}, "label": label})
    if chart.line is not None:
        label = {"formatter": f"{chart.line:g}", "color": INK[style.dark], "position": "insideEndTop"}
        marks.append({"yAxis": chart.line, "lineStyle": {"color": RED}, "label": label})
    return marks


def _pairs(x: Array, values: Array) -> list[list[float]]:
    return [[place, float(f"{value:.6g}")] for place, value in zip(x.tolist(), values.tolist())]


def legend_height(labels: Mapping[str, str]) -> int:
    """Return the height in pixels of a legend that shows all labels on the narrowest chart."""
    width = sum(ENTRY_PX + LABEL_PX * len(label) for label in labels.values())
    return LEGEND_LINE_PX * max(1, math.ceil(width / NARROW_PX))


def _options(series: list[dict[str, Any]], labels: Mapping[str, str], style: ChartStyle, unit: str) -> dict[str, Any]:
    """Return the options that all charts share.

    Args:
        series: the lines or bars.
        labels: labels in the legend by name of a series; tooltips show the name.
        style: language and colors.
        unit: name of the y-axis.
    """
    ink, rule = INK[style.dark], "#374151" if style.dark else "#e5e7eb"
    axis = {
        "type": "value",
        "scale": True,
        "nameTextStyle": {"color": ink, "fontSize": 11},
        "axisLabel": {"color": ink, "hideOverlap": True},
        "axisLine": {"lineStyle": {"color": rule}, "onZero": False},
    }
    x_axis = {"name": style.say("step"), "nameLocation": "middle", "nameGap": 22, "splitLine": {"show": False}}
    y_axis = {"name": unit, "nameGap": 26, "nameTextStyle": {"color": ink, "fontSize": 11, "align": "left"}}
    tooltip = {"backgroundColor": "#1f2937", "borderColor": rule, "textStyle": {"color": "#f3f4f6"}}
    tools = {"dataZoom": {"yAxisIndex": "none"}, "restore": {"title": "↺"}, "saveAsImage": {"title": "PNG"}}
    legend = {"type": "plain", "bottom": 0, "left": "center", "icon": "circle", "itemHeight": 10, "itemWidth": 10}
    legend |= {"itemGap": 8, "textStyle": {"fontSize": 11, "color": ink}}
    # a function in the browser, because a label may differ from the name of its series
    label = f"name => new Map({orjson.dumps([*labels.items()]).decode()}).get(name) ?? name"
    below = legend_height(labels) + 24
    return {
        "animation": False,
        "backgroundColor": "transparent",
        "grid": {"left": 12, "right": 28, "top": 48, "bottom": below, "containLabel": True},
        # as text, not as markup: names of runs and metrics come from files
        "tooltip": {"trigger": "axis", "renderMode": "richText", **(tooltip if style.dark else {})},
        "xAxis": {**axis, **x_axis, "min": "dataMin", "max": "dataMax"},
        "yAxis": {**axis, **y_axis, "splitLine": {"lineStyle": {"color": rule}}},
        # without Ctrl, the wheel scrolls the page
        "dataZoom": [{"type": "inside", "zoomOnMouseWheel": "ctrl", "filterMode": "none"}],
        "toolbox": {"right": 8, "top": -4, "itemSize": 13, "iconStyle": {"borderColor": GREY}, "feature": tools},
        "legend": {**legend, "data": [*labels], ":formatter": label},
        "series": series,
    }
