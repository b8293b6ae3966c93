"""The charts of one run, and the slider that smooths them."""

from __future__ import annotations

from nicegui import ui
from nicegui.events import ValueChangeEventArguments

from verl_ext.monitor.charts import MAIN, OTHER, Chart, charts_for
from verl_ext.monitor.options import chart_option
from verl_ext.monitor.page.context import PageContext
from verl_ext.monitor.view import RunView

GRID = "w-full grid grid-cols-1 lg:grid-cols-2 gap-4"


class CurvesPanel:
    """Builds itself where it is made.

    Args:
        context: of the page.
    """

    def __init__(self, context: PageContext) -> None:
        self._context, self._charts = context, dict[Chart, ui.echart]()
        with ui.row().classes("w-full items-center gap-4"):
            ui.label(context.say("Smoothing")).classes("text-sm")
            slider = (
                ui.slider(min=0, max=0.99, step=0.01, value=context.smoothing)
                .classes("w-64")
                .props('data-testid="smoothing"')
            )
            slider.props("label")
            slider.on_value_change(self._smooth)
            self._download = ui.link(context.say("Download CSV")).classes("text-sm").props('data-testid="csv"')
        self._places = {MAIN: ui.element("div").classes(GRID)}
        self._fold = ui.expansion(context.say("Other charts"), value=bool(context.settings.get("fold")))
        self._fold.classes("w-full").props('data-testid="fold"').on_value_change(self._toggle)
        with self._fold:
            self._places[OTHER] = ui.element("div").classes(GRID)
        self._view: RunView | None = None

    def show(self, view: RunView) -> None:
        """Draw what is open; charts appear as the run gets metrics."""
        self._view = view
        self._download.props(f'href="csv/{view.run}"')
        wanted = charts_for(view.metrics)
        for gone in [each for each in self._charts if each not in wanted]:
            self._charts.pop(gone).parent_slot.parent.delete()
        for number, chart in enumerate(wanted):
            if chart.place == OTHER and not self._fold.value:
                continue
            option = chart_option(view, chart, self._context.smoothing, self._context.language, self._context.dark)
            if chart in self._charts:
                self._charts[chart].options.clear()
                self._charts[chart].options.update(option)
                self._charts[chart].update()
            else:
                before = sum(other.place == chart.place for other in wanted[:number])
                self._charts[chart] = self._add(chart, option, before)

    def _add(self, chart: Chart, option: dict, before: int) -> ui.echart:
        """Behind so many others, whichever metrics came first."""
        with self._places[chart.place], ui.card().classes("w-full") as card:
            card.move(target_index=before)
            ui.label(self._context.say(chart.name)).classes("text-sm font-medium")
            return ui.echart(option).classes("w-full h-72").props(f'data-testid="chart {chart.name}"')

    def _smooth(self, event: ValueChangeEventArguments) -> None:
        self._context.settings["smoothing"] = event.value
        self._redraw()

    def _toggle(self, event: ValueChangeEventArguments) -> None:
        self._context.settings["fold"] = event.value
        self._redraw()

    def _redraw(self) -> None:
        if self._view is not None:
            self.show(self._view)
