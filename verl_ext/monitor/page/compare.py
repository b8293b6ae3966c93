"""Several runs in one chart."""

from __future__ import annotations

from nicegui import ui

from verl_ext.monitor.options import comparison_option
from verl_ext.monitor.page.context import MOST_VIEWS, PageContext
from verl_ext.monitor.view import RunView


class ComparePanel:
    """Builds itself where it is made.

    Args:
        context: of the page.
    """

    def __init__(self, context: PageContext) -> None:
        self._context = context
        runs = {row["id"]: row["path"] for row in context.runs()}
        chosen = [each for each in context.settings.get("compared", []) if each in runs]
        with ui.row().classes("w-full items-center"):
            self._runs = ui.select(runs, multiple=True, value=chosen, label=context.say("Runs to compare"))
            self._runs.classes("w-96").props("use-chips").props('data-testid="compared"').on_value_change(self._choose)
            self._metric = ui.select(["train/loss"], value="train/loss", label=context.say("Metric"), with_input=True)
            self._metric.classes("w-80").props('data-testid="compared metric"').on_value_change(self._draw)
        self._chart = ui.echart({}).classes("w-full h-96").props('data-testid="chart comparison"')

    def show(self, view: RunView) -> None:
        """Draw what is chosen, or else the run that is looked at."""
        if not self._runs.value:
            self._runs.set_value([view.run])
        else:
            self._draw()

    def _choose(self) -> None:
        self._runs.value = self._runs.value[-MOST_VIEWS + 1 :]
        self._context.settings["compared"] = self._runs.value
        self._draw()

    def _draw(self) -> None:
        views, known = {}, {row["id"] for row in self._context.runs()}
        for run in (each for each in self._runs.value if each in known):  # one may be gone by now
            view = self._context.view(run)
            view.refresh()
            views[view.record["path"]] = view
        names = sorted({name for view in views.values() for name in view.metrics})
        if names != self._metric.options and names:
            self._metric.set_options(names, value=self._metric.value if self._metric.value in names else names[0])
        option = comparison_option(views, self._metric.value, self._context.smoothing, self._context.dark)
        self._chart.options.clear()
        self._chart.options.update(option)
        self._chart.update()
