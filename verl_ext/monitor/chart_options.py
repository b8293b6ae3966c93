"""The ECharts options of each kind of chart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from verl_ext.health.trend import Array
from verl_ext.monitor.charts import Chart, is_validation, short_labels, unit_of
from verl_ext.monitor.colors import ERRORS, GRAY, GREEN, INK, RED, SERIES
from verl_ext.monitor.curves import AXES, CurveEnvelope, RunCurves, breaks_of, is_worth_smoothing, smooth_parts
from verl_ext.monitor.text import translate

FAINT = 0.25
"""Opacity of the raw curve behind the smoothed one, and of a confidence band."""
LEGEND_LINE_PX = 18
NARROW_PX = 320
"""Width of the narrowest chart, on a phone."""
LABEL_PX, ENTRY_PX = 7, 28
"""Estimated width of a legend entry: per character of the label, and of marker and gap."""
MAX_LABEL_CHARACTERS = 38
"""Maximum length of the name of a run in a legend."""
AXIS_NAMES = {"step": "step", "tokens": "trained tokens", "time": "minutes"}
"""Name of the x-axis for each of `AXES`."""
STEP_OF_ATTEMPT = """({{value}}) => {{
  const [start, offset, name] = {}.findLast(([start]) => start < value) ?? {}[0];
  return `${{Math.round(value - offset)}} · ${{name}}`;
}}"""
"""Function in the browser that returns the run's own step at a place over all attempts."""
RESET_ICON = "path://M12 5V1L7 6l5 5V7a6 6 0 1 1-6 6H4a8 8 0 1 0 8-8z"
RESET = "(model, api) => api.dispatchAction({type: 'dataZoom', start: 0, end: 100})"
"""Function of the button in the browser that shows the whole x-axis."""
TOOLTIP = {
    **{"trigger": "axis", "className": "chart-tooltip", "confine": True},
    # in the page, because a small chart would cut it; ECharts escapes the names, which come from files
    **{"renderMode": "html", "appendTo": "body"},
    "textStyle": {"fontSize": 12},
    "extraCssText": "max-width: min(80vw, 36rem); white-space: normal; overflow-wrap: anywhere; z-index: 5000",
}
LINE_TYPES = ("solid", "dashed", "dotted")
Stroke = tuple[str, str]
"""Color and line type of a curve."""
RATE_UNIT = "rate"
RATE_WITH_BAND = "rate; shaded: 95% CI"  # short, because a phone has 160 px beside the tools


@dataclass(frozen=True)
class ChartStyle:
    """How charts are drawn; see the attributes of `PageState`.

    Attributes:
        log_scale: whether the y-axis is logarithmic, if all values are positive.
        window: the visible part of the x-axis, in its unit; None for all.
    """

    smoothing: float
    language: str = "en"
    dark: bool = False
    axis: str = AXES[0]
    log_scale: bool = False
    window: tuple[float, float] | None = None

    def say(self, text: str) -> str:
        """Translate a text."""
        return translate(self.language, text)


def chart_options(
    curves: RunCurves,
    chart: Chart,
    style: ChartStyle,
    schedule: Sequence[tuple[int, float]] = (),
    zoomed: Mapping[str, CurveEnvelope] | None = None,
) -> dict[str, Any]:
    """Return one chart of one run; the caller holds the curves' lock.

    Args:
        curves: curves of the run.
        chart: metrics to draw.
        style: how to draw them.
        schedule: from `schedule_points`.
        zoomed: curves within the style's window; None for the whole ones.
    """
    weight = 0.0 if chart.with_schedule else style.smoothing
    style = replace(style, axis=style.axis if curves.has_axis(style.axis) else AXES[0])
    series = [
        line
        for metric, stroke in zip(chart.metrics, strokes())
        for line in _lines((zoomed or curves.envelopes)[metric], curves, metric, stroke, style, weight, chart.scale)
    ]
    ends = curves.ends(style.axis)
    labels = short_labels(chart.metrics, style.language)
    if chart.with_schedule and schedule:
        name = style.say("schedule")
        labels[name] = name
        dashed = {"type": "dashed", "width": 1.5, "color": GRAY}
        x, values = np.array(schedule, float).T
        # on another axis, the schedule ends with the run, because future steps have no time
        known = x <= (math.inf if style.axis == AXES[0] else curves.ends()[1])
        places = curves.to_axis(x[known], style.axis)
        ends += places.tolist()
        series.append({**_line(name, GRAY), "lineStyle": dashed, "data": _pairs(places, values[known])})
    series[0]["markLine"] = {"silent": True, "symbol": "none", "data": _marks(curves, chart, style)}
    options = _curve_options(series, labels, chart.unit, style, ends)
    if style.axis == AXES[0] and any(curves.offsets.values()):
        starts = [
            (start, curves.offsets[attempt], style.say("attempt {}").format(attempt))
            for attempt, start in curves.starts.items()
        ]
        attempts = orjson.dumps(starts).decode()
        options["xAxis"]["name"] = style.say("step over all attempts")
        options["xAxis"]["axisPointer"]["label"][":formatter"] = STEP_OF_ATTEMPT.format(attempts, attempts)
    return options


def comparison_options(
    runs: Mapping[str, RunCurves], metric: str, style: ChartStyle, zoomed: Mapping[str, CurveEnvelope]
) -> dict[str, Any]:
    """Return a chart of one metric of several runs, on an axis of their own steps: repeated steps are drawn once.

    Args:
        runs: curves by name in the legend.
        metric: the metric, which some runs may not have.
        style: how to draw it; the axis counts steps unless all runs have the chosen one.
        zoomed: curves within the style's window by name in the legend; empty for the whole ones.
    """
    series: list[dict[str, Any]] = []
    ends: list[float] = []
    style = replace(style, axis=comparison_axis(runs.values(), style.axis))
    for (name, curves), stroke in zip(runs.items(), strokes()):
        with curves.lock:
            if metric in curves.envelopes:
                envelope = zoomed.get(name, curves.envelopes[metric])
                by_step = style.axis == AXES[0]
                lines = _lines(envelope, curves, metric, stroke, style, style.smoothing, by_step=by_step)
                series += [{**line, "name": name} for line in lines]
                ends += curves.step_ends() if by_step else curves.ends(style.axis)
    return _curve_options(series, _shortened([*runs]), unit_of(metric), style, ends)


def comparison_axis(runs: Iterable[RunCurves], axis: str) -> str:
    """Return the axis if all runs have it, else that of steps."""
    return axis if all(curves.has_axis(axis) for curves in runs) else AXES[0]


def _curve_options(
    series: list[dict[str, Any]], labels: Mapping[str, str], unit: str, style: ChartStyle, ends: Sequence[float]
) -> dict[str, Any]:
    options = _options(series, labels, style, unit_text(unit, style.language))
    low, high = (float(min(ends)), float(max(ends))) if ends else (0.0, 1.0)
    options["xAxis"] |= {"name": style.say(AXIS_NAMES[style.axis]), "min": low, "max": high}
    if style.axis == "time":
        options["xAxis"]["axisPointer"] = {"label": {"precision": 2}}
    options["dataZoom"][0] |= {"startValue": low, "endValue": high}
    if style.log_scale and all(value is None or value > 0 for line in series for _, value in line["data"]):
        options["yAxis"]["type"] = "log"
    return options


def unit_text(unit: str, language: str) -> str:
    """Return a unit as the name of an axis."""
    return translate(language, "no unit" if unit == "1" else unit)


def rates_options(
    rates: Mapping[str, Mapping[int, tuple[float, float, float]]],
    best: int | None,
    style: ChartStyle,
) -> dict[str, Any]:
    """Return a chart of the rates of evaluated checkpoints, with confidence bands.

    Args:
        rates: by name and step, in ascending order, the rate and its bounds.
        best: step of the best checkpoint.
        style: language and colors.
    """
    series: list[dict[str, Any]] = []
    for (name, values), (color, kind) in zip(rates.items(), strokes()):
        points = [[step, rate] for step, (rate, _, _) in values.items()]
        marked = {"lineStyle": {"type": kind}, "symbol": "circle", "symbolSize": 8, "showSymbol": True}
        series.append({**_line(name, color), "data": points, **marked})
    has_bands = any(low < high for values in rates.values() for _, low, high in values.values())
    if has_bands:
        series += [_band(name, values, color) for (name, values), (color, _) in zip(rates.items(), strokes())]
    if best is not None and series:
        mark = {"xAxis": best, "lineStyle": {"color": GREEN}, "label": {"formatter": "★", "color": INK[style.dark]}}
        series[0]["markLine"] = {"silent": True, "symbol": "none", "data": [mark]}
    unit = style.say(RATE_WITH_BAND if has_bands else RATE_UNIT)
    options = _options(series, short_labels([*rates], style.language), style, unit)
    options["yAxis"] |= {"min": 0, "max": 1}
    return options


def _band(name: str, values: Mapping[int, tuple[float, float, float]], color: str) -> dict[str, Any]:
    """Return the area between the bounds of a rate: a line along the upper bounds and back along the lower ones."""
    upper = [[step, high] for step, (_, _, high) in values.items()]
    lower = [[step, low] for step, (_, low, _) in values.items()]
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
    del options["dataZoom"], options["toolbox"]["feature"]["dataZoom"], options["toolbox"]["feature"]["myReset"]
    return options


def _lines(
    envelope: CurveEnvelope,
    curves: RunCurves,
    metric: str,
    stroke: Stroke,
    style: ChartStyle,
    smoothing: float,
    scale: float = 1.0,
    by_step: bool = False,
) -> list[dict[str, Any]]:
    """Return the curve, or the smoothed curve and a faint raw curve behind it; validations have markers instead.

    With `by_step`, the x-axis counts the run's own steps, without those that a later attempt repeats.
    """
    gaps = curves.gaps.get(metric, [])
    (x, values), (middles, means) = envelope.points(), envelope.means()
    if by_step:
        x, values = curves.without_lost_steps(x, values)
        middles, means = curves.without_lost_steps(middles, means)
        gaps = curves.without_lost_steps(np.array(gaps), np.array(gaps))[0].tolist()
    color, kind = stroke
    line = _line(metric, color)
    raw = {
        **line,
        "data": _pairs_with_gaps(curves, x, values * scale, gaps, style.axis),
        "lineStyle": {"width": 1.5, "type": kind},
        "showSymbol": len(values) <= 1 + len(breaks_of(x, gaps)),  # no two points are connected
    }
    if is_validation(metric):
        return [{**raw, "showSymbol": True, "symbol": "circle", "symbolSize": 6}]
    if not is_worth_smoothing(len(values), smoothing):
        return [raw]
    faint = {
        "lineStyle": {"width": 1, "opacity": FAINT, "type": kind},
        "tooltip": {"show": False},
        "silent": True,
        "z": 1,
    }
    means = smooth_parts(means, breaks_of(middles, gaps), smoothing)
    smoothed = _pairs_with_gaps(curves, middles, means * scale, gaps, style.axis)
    return [{**line, "data": smoothed, "lineStyle": {"width": 2, "type": kind}}, {**raw, **faint}]


def strokes() -> Iterator[Stroke]:
    """Yield the color and line type of each curve of a chart; after the last color, dashes tell curves apart."""
    for kind in itertools.cycle(LINE_TYPES):
        for color in SERIES:
            yield color, kind


def _line(name: str, color: str) -> dict[str, Any]:
    return {"name": name, "type": "line", "showSymbol": False, "itemStyle": {"color": color}}


def _marks(curves: RunCurves, chart: Chart, style: ChartStyle) -> list[dict[str, Any]]:
    """Return marks of the starts of attempts, and the chart's own line."""
    marks: list[dict[str, Any]] = []
    starts = np.array([*curves.starts.values()][1:], float)
    for attempt, place in zip([*curves.starts][1:], curves.to_axis(starts, style.axis).tolist()):
        text = style.say("attempt {}").format(attempt)
        label = {"formatter": text, "color": INK[style.dark], "fontSize": 11}
        marks.append({"xAxis": place, "lineStyle": {"color": GRAY, "type": "dotted"}, "label": label})
    if chart.line is not None:
        label = {"formatter": f"{chart.line:g}", "color": INK[style.dark], "position": "insideEndTop"}
        marks.append({"yAxis": chart.line, "lineStyle": {"color": RED}, "label": label})
    return marks


def _pairs_with_gaps(
    curves: RunCurves, x: Array, values: Array, gaps: Sequence[float], axis: str
) -> tuple[tuple[float, float | None], ...]:
    """Return points with an empty one in each gap, where ECharts interrupts the line."""
    breaks = breaks_of(x, gaps)
    x = np.insert(x, [*breaks], [*breaks.values()])
    return _pairs(curves.to_axis(x, axis), np.insert(values, [*breaks], math.nan))


def _pairs(x: Array, values: Array) -> tuple[tuple[float, float | None], ...]:
    """Return points as tuples, because NiceGUI wraps each list in an object that notices changes."""
    rounded = (None if math.isnan(value) else float(f"{value:.6g}") for value in values.tolist())
    return tuple((float(f"{place:.10g}"), value) for place, value in zip(x.tolist(), rounded))


def _shortened(names: Sequence[str]) -> dict[str, str]:
    """Return labels that fit into a line of the narrowest legend, unless two would be equal."""
    head, tail = MAX_LABEL_CHARACTERS // 2, MAX_LABEL_CHARACTERS // 2 - 1
    labels = [f"{name[:head]}…{name[-tail:]}" if len(name) > MAX_LABEL_CHARACTERS else name for name in names]
    return dict(zip(names, labels if len({*labels}) == len(names) else names))


def legend_height(labels: Mapping[str, str]) -> int:
    """Return the height in pixels of a legend that shows all labels on the narrowest chart."""
    lines, used = 1, 0
    for label in labels.values():
        width = ENTRY_PX + LABEL_PX * len(label)
        if used and used + width > NARROW_PX:
            lines, used = lines + 1, 0
        used += width
    return LEGEND_LINE_PX * lines


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
    x_axis["axisPointer"] = {"label": {"precision": 0}}  # counts; by default, ECharts shows decimals
    y_axis = {"name": unit, "nameGap": 26, "nameTextStyle": {"color": ink, "fontSize": 11, "align": "left"}}
    tooltip = {"backgroundColor": "#1f2937", "borderColor": rule, "textStyle": {"color": "#f3f4f6", "fontSize": 12}}
    tools: dict[str, Any] = {"dataZoom": {"yAxisIndex": "none"}, "saveAsImage": {"title": "PNG"}}
    tools["myReset"] = {"show": True, "title": "↺", "icon": RESET_ICON, ":onclick": RESET}
    legend = {"type": "plain", "bottom": 0, "left": "center", "icon": "circle", "itemHeight": 10, "itemWidth": 10}
    legend |= {"itemGap": 8, "textStyle": {"fontSize": 11, "color": ink}}
    # a function in the browser, because a label may differ from the name of its series
    label = f"name => new Map({orjson.dumps([*labels.items()]).decode()}).get(name) ?? name"
    below = legend_height(labels) + 24
    return {
        "animation": False,
        "backgroundColor": "transparent",
        "grid": {"left": 12, "right": 28, "top": 48, "bottom": below, "containLabel": True},
        "tooltip": {**TOOLTIP, **(tooltip if style.dark else {})},
        "xAxis": {**axis, **x_axis, "min": "dataMin", "max": "dataMax"},
        "yAxis": {**axis, **y_axis, "splitLine": {"lineStyle": {"color": rule}}},
        # without Ctrl, the wheel scrolls the page
        "dataZoom": [{"type": "inside", "zoomOnMouseWheel": "ctrl", "filterMode": "none"}],
        "toolbox": {"right": 8, "top": -4, "itemSize": 13, "iconStyle": {"borderColor": GRAY}, "feature": tools},
        "legend": {**legend, "data": [*labels], ":formatter": label},
        "series": series,
    }
