"""Tabs that draw curves: training, evaluation, and comparison of runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
from nicegui import ui
from nicegui.events import GenericEventArguments, ValueChangeEventArguments

from verl_ext.checkpoint.manifest import step_of
from verl_ext.checkpoint.retention import read_best_file
from verl_ext.config.run_config import flat_values
from verl_ext.metrics.registry import EVAL_PREFIX
from verl_ext.monitor.chart_options import (
    AXIS_NAMES,
    ChartStyle,
    chart_options,
    comparison_axis,
    comparison_options,
    errors_options,
    rates_options,
)
from verl_ext.monitor.charts import (
    MAIN,
    MORE,
    OTHER,
    Chart,
    charts_for,
    metric_hint,
    more_charts,
    registered,
    schedule_points,
    short_names,
    unit_of,
)
from verl_ext.monitor.colors import ERRORS
from verl_ext.monitor.curves import AXES, RunCurves
from verl_ext.monitor.database import RunInfo
from verl_ext.monitor.follower import RunFollower
from verl_ext.monitor.run_files import config_or_empty
from verl_ext.monitor.state import MAX_COMPARED, MAX_SMOOTHING, PageState
from verl_ext.monitor.text import format_number

GRID = "w-full grid grid-cols-1 lg:grid-cols-2 gap-4"
DEFAULT_RATES = ("accepted_at_1", "exec_success_rate")
CHARTS_S = 2.0
"""Minimum seconds between two updates of charts, which send all of their points."""
ZOOM_S = 0.1
"""Seconds between two reads of finer points while a visitor zooms."""
KEEP_WINDOW = """((chart, zoom, axis) => {
  const drawn = chart.getOption(), own = drawn?.dataZoom?.[0];
  const keep = drawn?.xAxis?.[0].name === axis && own.end - own.start < 99.9999;
  return [keep ? {...zoom, startValue: own.startValue, endValue: own.endValue} : zoom];
})"""
"""The browser knows the visible part of a chart before the server does, so new points leave it as it is."""
MORE_PER_PAGE = 12
"""Number of metrics without a predefined chart that are drawn at once."""
PLOT_PX = 240
"""Height of a chart without what is below its plot."""
RAW = {"__v_skip": True}
"""Vue's mark of an object without proxies; a proxy around every point makes ECharts take twice as long."""
DEFAULT_METRICS = ("train/loss",)
MAX_SHOWN_CHARACTERS = 80
"""Maximum length of a value in a table."""
SORT = """(rows, name, descending) => {
  const number = {__proto__: null, nan: NaN, inf: Infinity, '-inf': -Infinity};
  const valued = rows.map(row => [number[row[name]] ?? row[name] ?? '', row]);
  const missing = valued.filter(([value]) => value === '' || Number.isNaN(value));
  const order = ([a], [b]) => typeof a === 'number' && typeof b === 'number' ? (a > b) - (a < b)
    : String(a).localeCompare(String(b), undefined, {numeric: true});
  const found = valued.filter(([value]) => value !== '' && !Number.isNaN(value));
  found.sort((one, other) => descending ? order(other, one) : order(one, other));
  return [...found, ...missing].map(([, row]) => row);
}"""
"""Function in the browser that sorts rows; missing values are last in both directions."""
SORTABLE_HEADER = """<q-th :props="props" :tabindex="props.col.sortable ? 0 : null"
  :aria-sort="{sorted: 'ascending', 'sort-desc': 'descending'}[props.col.__thClass.trim().split(' ').pop()]"
  @keydown.enter.space.prevent="$event.currentTarget.click()">{{ props.col.label }}</q-th>"""
"""Header of a column that the keyboard reaches, and whose order a screen reader announces."""
Go = Callable[..., None]
"""Changes attributes of the page's state and the address; see `MonitorPage.go`."""
Tagged = TypeVar("Tagged", bound=ui.element)


def tag(element: Tagged, name: str, **attributes: Any) -> Tagged:
    """Name an element for tests, and set attributes; `props` would parse names that come from files."""
    element.props["data-testid"] = name
    for attribute, value in attributes.items():
        element.props[attribute] = value
    return element


def heading(text: str, classes: str = "text-base font-medium", level: int = 3) -> ui.label:
    """Create the title of a section: 1 is the page's level, 2 that of a run, 3 that of a section, 4 that of a chart."""
    return ui.label(text).classes(classes).props(f"role=heading aria-level={level}")


def columns_of(names: Iterable[str], say: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return sortable columns of a table, with translated names as labels."""
    return [{"name": name, "label": say(name), "field": name, "align": "left", "sortable": True} for name in names]


class DataTable(ui.table, component="data_table.js"):  # type: ignore[call-arg]  # mypy does not see the base class
    """A table whose cells have templates, and keep the focus when the table is updated."""


def data_table(
    name: str,
    columns: list[dict[str, Any]],
    key: str,
    say: Callable[[str], str],
    empty: str = "Nothing yet",
    templates: Mapping[str, str] | None = None,
    **more: Any,
) -> DataTable:
    """Create a table in the page's language that the keyboard can sort.

    Args:
        name: name in tests.
        columns: see `columns_of`.
        key: column that identifies a row.
        say: translates a text of the page.
        empty: text of a table without rows.
        templates: Vue template by name of a slot of `QTable`; its variable `props` is the slot's.
        more: passed to `DataTable`.
    """
    table = tag(DataTable(columns=columns, rows=[], row_key=key, **more).classes("w-full"), name)
    table.props("flat bordered dense wrap-cells").props.update(
        {
            "no-data-label": say(empty),
            "no-results-label": say("No matching rows"),
            "rows-per-page-label": say("Rows per page"),
            ":pagination-label": "(first, last, all) => `${first}–${last} / ${all}`",
            ":selected-rows-label": f"count => {json.dumps(say('{} selected'))}.replace('{{}}', count)",
            ":sort-method": SORT,
            "templates": {"header-cell": SORTABLE_HEADER, **(templates or {})},
        }
    )
    return table


class Panel:
    """One tab; its elements are built where it is created."""

    period_s = 0.0
    """Seconds between two reads of the panel's own files; 0 redraws the panel whenever there are new rows."""
    pause_s = 0.0
    """Minimum seconds between two redraws because of new rows."""

    def __init__(self, follower: RunFollower, state: PageState, go: Go) -> None:
        self.follower, self.state, self.go = follower, state, go
        self.build()

    def build(self) -> None:
        """Create the elements."""

    async def show(self) -> None:
        """Update the panel."""
        self.redraw()

    def redraw(self) -> None:
        """Draw changes, for example of a setting."""

    @property
    def run(self) -> RunInfo | None:
        """The shown run; None if there is none, or it no longer exists."""
        return self.follower.runs.get(self.state.run)

    def say(self, text: str) -> str:
        """Translate a text to the page's language."""
        return self.state.translate(text)

    def style(self) -> ChartStyle:
        """Return the chart style of the page."""
        return ChartStyle(self.state.smoothing, self.state.language, self.state.dark, self.state.axis)

    def style_of(self, name: str, card: ChartCard | None) -> ChartStyle:
        """Return the style of a chart with its own scale and window; `card` is None if it is not drawn yet."""
        window = card.window_on(self.state.axis) if card is not None else None
        return replace(self.style(), log_scale=name in self.state.log_charts, window=window)

    def toggle_log(self, name: str) -> None:
        """Switch the scale of a chart between linear and logarithmic."""
        others = tuple(each for each in self.state.log_charts if each != name)
        self.change(log_charts=others if name in self.state.log_charts else (*others, name))

    def build_style_controls(self) -> None:
        """Create a slider for the smoothing and a selector of the x-axis; both call `redraw`."""
        ui.label(self.say("Smoothing")).classes("text-sm")
        slider = ui.slider(min=0, max=MAX_SMOOTHING, step=0.01, value=self.state.smoothing).classes("w-48")
        tag(slider.props("label"), "smoothing", **{"aria-label": self.say("Smoothing")}).on_value_change(
            lambda event: self.change(smoothing=round(event.value, 2))
        )
        names = {axis: self.say(name) for axis, name in AXIS_NAMES.items()}
        axis = tag(ui.select(names, value=self.state.axis, label=self.say("x-axis")).classes("min-w-32"), "axis")
        axis.props("dense").on_value_change(lambda event: self.change(axis=event.value))

    def change(self, **changes: Any) -> None:
        """Change settings within the panel and redraw."""
        self.go(push=False, **changes)
        self.redraw()


class ChartCard:
    """A chart with its title and a hint behind an icon.

    Args:
        title: text of the head.
        hint: text behind the icon; empty for none.
        name: name in tests.
        panel: owner, which redraws the chart when its window or scale changes; None for a chart without either.
        scale_name: name of the chart in `PageState.log_charts`.

    Attributes:
        shown: the data that the owner has drawn.
        window: the visible part of the x-axis as the browser has sent it; None for all.
    """

    def __init__(self, title: str, hint: str, name: str, panel: Panel | None = None, scale_name: str = "") -> None:
        self.shown: object = None
        self.window: tuple[float, float] | None = None
        self._axis = "" if panel is None else panel.state.axis
        self._panel = panel
        with ui.card().classes("w-full p-3 gap-1").props("flat bordered") as self.card:
            with ui.row().classes("w-full items-center gap-1 no-wrap"):
                heading(title, "text-sm font-medium", level=4)
                if hint:
                    icon = tag(
                        ui.icon("help_outline", size="16px"), f"hint {name}", **{"aria-label": hint, "tabindex": 0}
                    )
                    with icon.classes("opacity-70 cursor-help"):
                        ui.tooltip(hint).classes("text-xs max-w-96 bg-grey-9 whitespace-pre-line")
                if panel is not None:
                    ui.space()
                    self._note = ui.label(panel.say("The log scale needs positive values")).classes("text-xs")
                    button = ui.button(panel.say("log"), on_click=lambda: panel.toggle_log(scale_name))
                    self._log = tag(button.props("dense flat unelevated no-caps size=sm"), f"log {name}")
            self._chart = tag(ui.echart({}).classes("w-full"), f"chart {name}", role="img", **{"aria-label": title})
        if panel is not None:
            reset = f"{self._model}.dispatchAction({{type: 'dataZoom', start: 0, end: 100}})"
            self._chart.on("dblclick", js_handler=f"() => {reset}")
            window = f"{self._model}.getOption().dataZoom[0]"
            emit = f"() => emit({window}.startValue, {window}.endValue)"
            self._chart.on("chart:datazoom", self._zoom, js_handler=emit, throttle=ZOOM_S)

    @property
    def _model(self) -> str:
        """The chart in the browser, as an expression."""
        return f"getElement({self._chart.id}).chart"

    def window_on(self, axis: str) -> tuple[float, float] | None:
        """Return the visible part of an x-axis; another axis shows all."""
        if axis != self._axis:
            self.window, self._axis = None, axis
        return self.window

    def _zoom(self, event: GenericEventArguments) -> None:
        """Set the window to what the visitor chose; the owner draws it."""
        low, high = map(float, event.args)
        ends = self._chart.options["xAxis"]
        margin = 1e-6 * (ends["max"] - ends["min"])
        is_all = low <= ends["min"] + margin and high >= ends["max"] - margin
        window = None if is_all or not low < high else (low, high)
        if self._panel is not None and window != self.window:
            self.window = window
            self._panel.redraw()

    def draw(self, options: dict[str, Any], log_scale: bool = False) -> None:
        """Redraw the chart with new options; the card grows with the legend."""
        self._chart.style(f"height: {PLOT_PX + options['grid']['bottom']}px")
        self._chart.options.clear()
        self._chart.options.update({**options, **RAW})
        if self._panel is not None:
            self._note.set_visibility(log_scale and options["yAxis"]["type"] != "log")
            self._log.props["flat"] = not log_scale
            [zoom], axis = options["dataZoom"], options["xAxis"]["name"]
            self._chart.options[":dataZoom"] = f"{KEEP_WINDOW}({self._model}, {json.dumps(zoom)}, {json.dumps(axis)})"
        self._chart.update()


class TrainingPanel(Panel):
    """The charts of one run, and the style controls."""

    pause_s = CHARTS_S

    def build(self) -> None:
        """Create the controls and the grids of the charts."""
        self._cards: dict[Chart, ChartCard] = {}
        with ui.row().classes("w-full items-center gap-4"):
            self.build_style_controls()
            ui.space()
            self._download = ui.link(self.say("Download CSV")).classes("text-sm").props('data-testid="csv"')
        self._places = {MAIN: ui.element("div").classes(GRID)}
        fold = ui.expansion(self.say("Other charts"), value=bool(self.state.preferences.get("fold")))
        fold.classes("w-full [&_.nicegui-expansion-content]:p-0 [&_.nicegui-expansion-content]:pt-2")
        self._fold = tag(fold.props("header-class=px-1"), "fold").on_value_change(self._toggle)
        with self._fold:
            self._places[OTHER] = ui.element("div").classes(GRID)
        more = ui.expansion().classes("w-full [&_.nicegui-expansion-content]:p-0 [&_.nicegui-expansion-content]:pt-2")
        self._more = tag(more.props("header-class=px-1"), "more").on_value_change(self.redraw)
        with self._more:
            self._places[MORE] = ui.element("div").classes(GRID)
            pages = ui.pagination(1, 1, direction_links=True, on_change=self.redraw).props("max-pages=6")
            self._pages = tag(pages.classes("mt-2"), "more pages")
        self._empty = tag(ui.label(self.say("Nothing yet")).classes("opacity-70"), "empty")

    def redraw(self) -> None:
        """Draw the visible charts that have changed."""
        run = self.run
        if run is None:
            return
        self._download.props["href"] = f"csv/{quote(run.path)}"
        curves = self.follower.curves(run)
        with curves.lock:
            wanted = charts_for(curves.envelopes)
            self._fold.set_visibility(any(chart.place == OTHER for chart in wanted))
            self._empty.set_visibility(not curves.envelopes)
            wanted += self._shown_more(more_charts(curves.envelopes, wanted))
            for gone in [each for each in self._cards if each not in wanted]:
                self._cards.pop(gone).card.delete()
            for number, chart in enumerate(wanted):
                if chart.place != OTHER or self._fold.value:
                    before = sum(other.place == chart.place for other in wanted[:number])
                    self._draw(run, curves, chart, before)

    def _shown_more(self, charts: list[Chart]) -> list[Chart]:
        """Return the charts of the page that is open in the fold of other metrics, and update the fold."""
        self._more.set_visibility(bool(charts))
        self._more.set_text(f"{self.say('More metrics')} ({len(charts)})")
        self._pages.max = max(1, math.ceil(len(charts) / MORE_PER_PAGE))
        self._pages.set_visibility(self._pages.max > 1)
        first = (self._pages.value - 1) * MORE_PER_PAGE
        return charts[first : first + MORE_PER_PAGE] if self._more.value else []

    def _draw(self, run: RunInfo, curves: RunCurves, chart: Chart, before: int) -> None:
        """Draw a chart after `before` others, unless it is up to date."""
        counts = [curves.envelopes[name].num_points for name in chart.metrics]
        card = self._cards.get(chart)
        style, total_steps = self.style_of(chart.name, card), run.total_steps if chart.with_schedule else None
        shown = (run.id, id(curves), counts, [*curves.starts], total_steps, style)
        if card is not None and card.shown == shown:
            return
        key = (run.id, run.generation, chart, style)
        options = self.follower.charts.get(key, shown, lambda: self._options(run, curves, chart, style))
        if card is None:
            with self._places[chart.place]:
                texts = chart.texts(self.state.language)
                card = self._cards[chart] = ChartCard(*texts, chart.name, self, chart.name)
            card.card.move(target_index=before)  # metrics appear in any order
        card.draw(options, style.log_scale)
        card.shown = shown

    def _options(self, run: RunInfo, curves: RunCurves, chart: Chart, style: ChartStyle) -> dict[str, Any]:
        schedule: list[tuple[int, float]] = []
        if chart.with_schedule:
            schedule = schedule_points(config_or_empty(self.follower.directory(run)), run, curves)
        zoomed = None
        if style.window is not None:
            low, high = curves.to_steps(np.array(style.window), style.axis).tolist()
            zoomed = self.follower.zoomed(run, curves, chart.metrics, low, high)
        return chart_options(curves, chart, style, schedule, zoomed)

    def _toggle(self, event: ValueChangeEventArguments) -> None:
        self.state.preferences["fold"] = event.value
        self.redraw()


class EvaluationPanel(Panel):
    """Evaluated checkpoints: chosen rates with intervals, error types, and the best checkpoint."""

    period_s = 3.0

    def build(self) -> None:
        """Create the selector of the rates and the box for the charts."""
        self._shown: object = None
        self._rates = ui.select([], multiple=True, label=self.say("Rates")).props("use-chips dense")
        tag(self._rates.classes("min-w-64"), "rates").on_value_change(self._choose_rates)
        self._box = ui.column().classes("w-full")

    def redraw(self) -> None:
        """Redraw if something has changed."""
        run = self.run
        if run is None:
            return
        by_dataset = self.follower.reader.evaluations(run.id)
        best = read_best_file(self.follower.directory(run))[0]
        best_step = None if best is None else step_of(best)
        known = known_rates(by_dataset)
        chosen = [name for name in self.state.rates or DEFAULT_RATES if name in known]
        shown = run.id, best_step, by_dataset, chosen, self.style()
        if shown == self._shown:
            return
        self._shown = shown
        self._rates.set_visibility(bool(known))
        self._rates.set_options(known, value=chosen)
        self._box.clear()
        with self._box:
            if not by_dataset:
                ui.label(self.say("Nothing yet")).classes("opacity-70")
            for dataset, metrics in by_dataset.items():
                self._draw(dataset, metrics, chosen, best_step)

    def _choose_rates(self, event: ValueChangeEventArguments) -> None:
        chosen = tuple(event.value or ())
        if chosen and chosen != (self.state.rates or DEFAULT_RATES):
            self.change(rates=chosen)

    def _draw(
        self, dataset: str, metrics: Mapping[int, Mapping[str, Any]], chosen: list[str], best: int | None
    ) -> None:
        style, steps = self.style(), sorted(metrics)
        suffix = f" ({self.say('best')}: {best})" if best is not None else ""
        tag(heading(f"{dataset}{suffix}", "text-lg"), "dataset")
        rates = rates_by_step(metrics, chosen)
        shares = {name: [_number(metrics[step].get(f"{name}_rate")) for step in steps] for name in ERRORS}
        meanings = [f"{name}: {metric_hint(EVAL_PREFIX + name, self.state.language)}" for name in rates]
        errors_hint = self.say("Fraction of the answers by the result of their tests; all parts add up to 1")
        with ui.element("div").classes(GRID):
            ChartCard(self.say("Rates by step"), "\n".join(meanings), "rates").draw(rates_options(rates, best, style))
            ChartCard(self.say("Error types"), errors_hint, "errors").draw(errors_options(steps, shares, style))


def known_rates(by_dataset: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    """Return the names of the rates that evaluations of any dataset have, in their order."""
    names = dict.fromkeys(name for each in by_dataset.values() for metrics in each.values() for name in metrics)
    return [name for name in names if registered(EVAL_PREFIX + name) and unit_of(EVAL_PREFIX + name) == "1"]


def rates_by_step(
    metrics: Mapping[int, Mapping[str, Any]], names: Sequence[str]
) -> dict[str, dict[int, tuple[float, float, float]]]:
    """Return each rate and its bounds by name and step, without steps that lack it: pass@k needs k samples."""
    found = {
        name: {step: _rate(each, name) for step, each in sorted(metrics.items()) if _is_number(each.get(name))}
        for name in names
    }
    return {name: values for name, values in found.items() if values}


def _rate(metrics: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    """Return a rate and the bounds of its interval; without an interval, the bounds are the rate."""
    value, intervals = _number(metrics.get(name)), metrics.get("intervals")
    bounds = intervals.get(name) if isinstance(intervals, dict) else None
    low, high = bounds if isinstance(bounds, list) and len(bounds) == 2 else (value, value)
    return value, _number(low), _number(high)


def _number(value: Any) -> float:
    return float(value) if _is_number(value) else 0.0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


class ComparePanel(Panel):
    """Metrics of several runs, their latest values, and the configuration keys that differ."""

    period_s = CHARTS_S

    def build(self) -> None:
        """Create the selectors and the boxes for charts and tables."""
        self._cards: dict[str, ChartCard] = {}
        self._tables: dict[str, DataTable] = {}
        self._shown_tables: object = None
        with ui.row().classes("w-full items-center gap-4"):
            self.build_style_controls()
        label = self.say("Runs to compare (at most {})").format(MAX_COMPARED)
        with ui.row().classes("w-full items-start gap-4"):
            self._runs = ui.select([], multiple=True, label=label, with_input=True)
            self._runs.classes("grow").props(f'use-chips max-values={MAX_COMPARED} data-testid="compared"')
            self._runs.on_value_change(self._choose_runs)
            self._metrics = ui.select([], multiple=True, label=self.say("Metrics"), with_input=True)
            self._metrics.classes("grow").props('use-chips data-testid="compared metric"')
            self._metrics.on_value_change(self._choose_metrics)
        self._note = tag(ui.label().classes("text-sm"), "compared note")
        self._grid = ui.element("div").classes(GRID)
        self._differences = ui.column().classes("w-full")

    def redraw(self) -> None:
        """Draw the runs and metrics of the address; by default the run of this page."""
        runs, compared = self.follower.runs, self._compared()
        text = self.say("{0} of the {1} runs in the address are shown: at most {2}, and only runs that exist")
        self._note.set_text(text.format(len(compared), len(self.state.runs), MAX_COMPARED))
        self._note.set_visibility(len(compared) < len(self.state.runs))
        self._offer(self._runs, [*runs], compared)
        curves = {path: self.follower.curves(runs[path]) for path in compared}
        known = sorted({name for each in curves.values() for name in each.envelopes})
        metrics = [name for name in self.state.metrics or DEFAULT_METRICS if name in known] or known[:1]
        self._offer(self._metrics, known, metrics)
        self._draw_charts(curves, metrics)
        self._show_tables([runs[path] for path in compared], metrics)

    def _compared(self) -> list[str]:
        """Return the paths of the chosen runs that exist."""
        return [path for path in self.state.runs or (self.state.run,) if path in self.follower.runs][:MAX_COMPARED]

    @staticmethod
    def _offer(select: ui.select, options: list[str], value: list[str]) -> None:
        if select.options != options or select.value != value:
            select.set_options(options, value=value)

    def _choose_runs(self, event: ValueChangeEventArguments) -> None:
        chosen = tuple(event.value or ())
        if chosen and set(chosen) != set(self._compared()):
            self.change(runs=chosen[:MAX_COMPARED])

    def _choose_metrics(self, event: ValueChangeEventArguments) -> None:
        if event.value and tuple(event.value) != (self.state.metrics or DEFAULT_METRICS):
            self.change(metrics=tuple(event.value))

    def _draw_charts(self, curves: Mapping[str, RunCurves], metrics: list[str]) -> None:
        for gone in [each for each in self._cards if each not in metrics]:
            self._cards.pop(gone).card.delete()
        for metric in metrics:
            card = self._cards.get(metric)
            style = self.style_of(metric, card)
            shown = [(path, id(each), each.version) for path, each in curves.items()], style
            if card is not None and card.shown == shown:
                continue
            key = (tuple(curves), metric, style)
            options = self.follower.charts.get(key, shown, partial(self._options, curves, metric, style))
            if card is None:
                with self._grid:
                    hint = metric_hint(metric, self.state.language)
                    card = self._cards[metric] = ChartCard(metric, hint, f"comparison {metric}", self, metric)
            card.draw(options, style.log_scale)
            card.shown = shown

    def _options(self, runs: Mapping[str, RunCurves], metric: str, style: ChartStyle) -> dict[str, Any]:
        names = dict(zip(runs, short_names([*runs])))
        zoomed = {}
        axis = comparison_axis(runs.values(), style.axis)
        for path, curves in runs.items():
            run = self.follower.runs.get(path)
            if style.window is not None and run is not None:
                with curves.lock:
                    window = np.array(style.window)
                    places = curves.to_places(window) if axis == AXES[0] else curves.to_steps(window, axis)
                    low, high = places.tolist()
                    part = self.follower.zoomed(run, curves, [metric], low, high).get(metric)
                if part is not None:
                    zoomed[names[path]] = part
        return comparison_options({names[path]: each for path, each in runs.items()}, metric, style, zoomed)

    def _show_tables(self, runs: list[RunInfo], metrics: list[str]) -> None:
        latest = {run.path: self.follower.summary(run)[1] for run in runs}
        values = {name: [format_number(latest[run.path].get(name)) for run in runs] for name in metrics}
        configs = [flatten(config_or_empty(self.follower.directory(run))) for run in runs]
        differences = differing_keys(configs)
        paths = [run.path for run in runs]
        shown = paths, bool(differences)
        if shown != self._shown_tables:
            self._shown_tables = shown
            self._build_tables(paths, bool(differences))
        self._fill_table("latest values", values)
        if differences:
            self._fill_table("differences", differences)

    def _build_tables(self, paths: list[str], has_differences: bool) -> None:
        """Create the tables; they stay while the runs log, with the order and the focus that the visitor chose."""
        self._differences.clear()
        with self._differences:
            heading(self.say("Latest values"))
            self._build_table("latest values", self.say("Metric"), paths)
            if len(paths) > 1:
                title = "Keys that differ" if has_differences else "The configurations are the same"
                tag(heading(self.say(title)), "configuration")
            if has_differences:
                self._build_table("differences", self.say("Configuration"), paths)

    def _build_table(self, name: str, label: str, paths: list[str]) -> None:
        labels = {"key": label, **{f"run{place}": path for place, path in enumerate(paths)}}
        self._tables[name] = data_table(name, columns_of(labels, lambda each: labels[each]), "key", self.say)

    def _fill_table(self, name: str, rows: Mapping[str, list[str]]) -> None:
        found = [
            {"key": key, **{f"run{place}": clip(value) for place, value in enumerate(values)}}
            for key, values in rows.items()
        ]
        if found != self._tables[name].rows:
            self._tables[name].rows = found


def clip(text: str, length: int = MAX_SHOWN_CHARACTERS) -> str:
    """Shorten a text."""
    return f"{text[:length]}…" if len(text) > length else text


def flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a configuration as text by dotted key."""
    values = flat_values(config)
    return {name: each if isinstance(each, str) else json.dumps(each, default=str) for name, each in values.items()}


def differing_keys(configs: list[dict[str, str]]) -> dict[str, list[str]]:
    """Return the keys with different values, and the value in each configuration; a dash for a missing key."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = {key: [config.get(key, "-") for config in configs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}
