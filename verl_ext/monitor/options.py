"""Curves as options of ECharts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_ext.monitor.charts import Chart
from verl_ext.monitor.curves.smooth import is_worth_smoothing, smooth
from verl_ext.monitor.text import words
from verl_ext.monitor.view import RunView

COLOURS = ("#3b82f6", "#ef4444", "#10b981", "#f59e0b", "#8b5cf6", "#ec4899", "#14b8a6", "#84cc16", "#64748b", "#f97316")
Rates = Mapping[str, Sequence[tuple[float, float, float]]]
"""By name: of each step the rate, and its interval's bounds."""
FAINT = 0.25
"""Opacity of the curve behind its smoothed one."""
GREY = "#9ca3af"


def chart_option(view: RunView, chart: Chart, smoothing: float, language: str, dark: bool) -> dict[str, Any]:
    """One chart of one run.

    Args:
        view: of the run.
        chart: of which metrics.
        smoothing: weight of `smooth`, 0 for none.
        language: of the words.
        dark: whether the page is.
    """
    names = list(chart.metrics)
    series = [
        line
        for metric, colour in zip(chart.metrics, COLOURS)
        for line in _lines(view, metric, chart.scale, 0.0 if chart.with_schedule else smoothing, colour)
    ]
    if chart.with_schedule and (line := _schedule(view, language)) is not None:
        series.append(line)
        names.append(line["name"])
    series[0]["markLine"] = {"silent": True, "symbol": "none", "data": _marks(view, chart, language)}
    return {**_frame(dark), "legend": _legend(names, dark), "series": series, "color": list(COLOURS)}


def comparison_option(views: Mapping[str, RunView], metric: str, smoothing: float, dark: bool) -> dict[str, Any]:
    """One metric of several runs, by their names."""
    series = [
        line
        for (name, view), colour in zip(views.items(), COLOURS)
        for line in _lines(view, metric, 1.0, smoothing, colour, name)
        if metric in view.metrics
    ]
    return {**_frame(dark), "legend": _legend(list(views), dark), "series": series, "color": list(COLOURS)}


def rates_option(steps: Sequence[int], rates: Rates, best: int | None, dark: bool) -> dict[str, Any]:
    """Rates of evaluated checkpoints with their intervals.

    Args:
        steps: of the checkpoints, rising.
        rates: of the answers.
        best: step of the chosen checkpoint; None for none.
        dark: whether the page is.
    """
    series: list[dict[str, Any]] = []
    for (name, values), colour in zip(rates.items(), COLOURS):
        points = [[step, value[0]] for step, value in zip(steps, values)]
        series.append({"name": name, "type": "line", "data": points, "itemStyle": {"color": colour}, "symbolSize": 8})
        for place, (low, high) in enumerate((value[1], value[2]) for value in values):
            ends = [[steps[place], low], [steps[place], high]]
            bar = {"color": colour, "width": 2, "opacity": 0.6}
            series.append(
                {"name": name, "type": "line", "data": ends, "lineStyle": bar, "symbol": "none", "silent": True}
            )
    if best is not None and series:
        mark = {"xAxis": best, "lineStyle": {"color": "#10b981"}, "label": {"formatter": "★", "color": "#10b981"}}
        series[0]["markLine"] = {"silent": True, "symbol": "none", "data": [mark]}
    frame = _frame(dark)
    frame["yAxis"] |= {"min": 0, "max": 1}
    return {**frame, "legend": _legend(list(rates), dark), "series": series}


def errors_option(steps: Sequence[int], shares: Mapping[str, Sequence[float]], dark: bool) -> dict[str, Any]:
    """What the answers of each checkpoint came to, as stacked bars."""
    series = [{"name": name, "type": "bar", "stack": "all", "data": list(values)} for name, values in shares.items()]
    frame = _frame(dark)
    frame["xAxis"] |= {"type": "category", "data": [str(step) for step in steps]}
    frame["yAxis"] |= {"min": 0, "max": 1}
    frame.pop("dataZoom")
    return {**frame, "legend": _legend(list(shares), dark), "series": series, "color": list(COLOURS)}


def _lines(
    view: RunView, metric: str, scale: float, smoothing: float, colour: str, name: str = ""
) -> list[dict[str, Any]]:
    """The curve, or its smoothed one in front of it."""
    curve = view.curve(metric)
    common = {"name": name or metric, "type": "line", "showSymbol": False, "itemStyle": {"color": colour}}
    x, values = curve.points()
    raw = {**common, "data": _pairs(x, values * scale), "lineStyle": {"width": 1.5}}
    if len(values) == 1:
        raw["showSymbol"] = True
    if not is_worth_smoothing(len(values), smoothing):
        return [raw]
    raw |= {"lineStyle": {"width": 1, "opacity": FAINT}, "tooltip": {"show": False}, "silent": True}
    x, values = curve.means()
    return [{**common, "data": _pairs(x, smooth(values, smoothing) * scale), "lineStyle": {"width": 2}}, raw]


def _schedule(view: RunView, language: str) -> dict[str, Any] | None:
    """The learning rate that the recipe asks for."""
    points = view.schedule_points()
    style = {"type": "dashed", "width": 1, "color": GREY}
    common = {"type": "line", "showSymbol": False, "lineStyle": style, "itemStyle": {"color": GREY}}
    return {**common, "name": words(language, "schedule"), "data": points} if points else None


def _marks(view: RunView, chart: Chart, language: str) -> list[dict[str, Any]]:
    """Where attempts begin, and the chart's own line."""
    marks: list[dict[str, Any]] = [
        {
            "xAxis": place,
            "lineStyle": {"color": GREY, "type": "dotted"},
            "label": {"formatter": f"{words(language, 'attempt')} {attempt}", "color": GREY},
        }
        for attempt, place in view.starts.items()
        if attempt != min(view.starts)
    ]
    if chart.line is not None:
        marks.append(
            {"yAxis": chart.line, "lineStyle": {"color": "#ef4444"}, "label": {"formatter": f"{chart.line:g}"}}
        )
    return marks


def _pairs(x: np.ndarray, values: np.ndarray) -> list[list[float]]:
    return [[place, float(f"{value:.6g}")] for place, value in zip(x.tolist(), values.tolist())]


def _frame(dark: bool) -> dict[str, Any]:
    ink, rule = ("#e5e7eb", "#374151") if dark else ("#374151", "#e5e7eb")
    axis = {"axisLabel": {"color": ink}, "splitLine": {"lineStyle": {"color": rule}}, "scale": True}
    return {
        "animation": False,
        "grid": {"left": 60, "right": 24, "top": 40, "bottom": 56},
        # as text, not as markup: names of runs and metrics come from files
        "tooltip": {"trigger": "axis", "renderMode": "richText"},
        "xAxis": {"type": "value", **axis, "min": "dataMin", "max": "dataMax"},
        "yAxis": {"type": "value", **axis},
        "dataZoom": [{"type": "inside"}, {"type": "slider", "height": 18, "bottom": 8}],
        "toolbox": {"right": 8, "top": 0, "feature": {"saveAsImage": {"title": "PNG"}, "restore": {"title": "↺"}}},
    }


def _legend(names: Sequence[str], dark: bool) -> dict[str, Any]:
    return {
        "data": list(names),
        "top": 4,
        "left": 8,
        "width": "76%",  # the toolbox stands at the right, and ECharts takes no right margin beside a left one
        "type": "scroll",
        "textStyle": {"color": "#e5e7eb" if dark else "#374151"},
    }
