"""The page: a head with the runs, and a tab for each panel, of which only the open one is kept up to date."""

from __future__ import annotations

import inspect
import time
from typing import Any

from nicegui import ui

from verl_ext.monitor.page.compare import ComparePanel
from verl_ext.monitor.page.context import DOTS, PageContext
from verl_ext.monitor.page.curves import CurvesPanel
from verl_ext.monitor.page.evaluation import EvaluationPanel
from verl_ext.monitor.page.health import HealthPanel
from verl_ext.monitor.page.log import LogPanel
from verl_ext.monitor.page.status import StatusPanel
from verl_ext.monitor.page.tables import CheckpointsPanel, SamplesPanel
from verl_ext.monitor.text import LANGUAGES

UPDATE_S = 0.3
"""Least time between two updates of a page."""
SLOW_S = 5.0
"""Between two looks of a panel that reads files of its own."""
PANELS: dict[str, Any] = {
    "Training": CurvesPanel,
    "Evaluation": EvaluationPanel,
    "Compare": ComparePanel,
    "Checkpoints": CheckpointsPanel,
    "Samples": SamplesPanel,
    "Health": HealthPanel,
    "Log": LogPanel,
}
SLOW = ("Evaluation", "Compare", "Checkpoints", "Samples", "Health")


class Page:
    """One open page; builds itself where it is made.

    Args:
        context: of the page.
    """

    def __init__(self, context: PageContext) -> None:
        self._context = context
        self._dark = ui.dark_mode(context.dark)
        self._box = ui.column().classes("w-full max-w-screen-2xl mx-auto p-2")
        self._build()
        ui.timer(UPDATE_S, self._update)

    def _build(self) -> None:
        """Draw all of it, in the language and the colours that are set."""
        self._panel: Any = None
        self._shown: tuple[int, str] | None = None
        self._drawn = 0.0
        self._box.clear()
        with self._box:
            self._head()
            if self._context.chosen is None:
                ui.label(self._context.say("No run yet")).classes("text-lg").props('data-testid="empty"')
                return
            self._status = StatusPanel(self._context)
            self._tabs()

    def _head(self) -> None:
        context, chosen = self._context, self._context.chosen
        with ui.row().classes("w-full items-center gap-4"):
            ui.label(context.say("Training monitor")).classes("text-xl font-bold")
            path = chosen and chosen.record["path"]
            self._select = ui.select(self._names(), value=path, label=context.say("Run"), with_input=True)
            self._select.classes("grow").props('data-testid="run"')
            self._select.on_value_change(lambda event: self._choose(event.value))
            language = ui.toggle(LANGUAGES, value=context.language).props('data-testid="language"')
            language.on_value_change(lambda event: self._set("language", event.value))
            dark = ui.switch(context.say("Dark"), value=context.dark).props('data-testid="dark"')
            dark.on_value_change(lambda event: self._set("dark", event.value))

    def _names(self) -> dict[str, str]:
        """What the selector offers: status and path of every run."""
        rows = self._context.runs()
        return {
            row["path"]: f"{DOTS[row['status']]} {row['path']} · {self._context.say(row['status'])}" for row in rows
        }

    def _tabs(self) -> None:
        tab = self._context.settings.get("tab")
        tab = tab if tab in PANELS else next(iter(PANELS))
        with ui.tabs(value=tab).classes("w-full") as tabs:
            for name in PANELS:
                ui.tab(name, label=self._context.say(name)).props(f'data-testid="tab {name}"')
        tabs.on_value_change(lambda event: self._open(event.value))
        self._panel_box = ui.column().classes("w-full")
        self._open(tab)

    def _open(self, tab: str) -> None:
        self._context.settings["tab"] = self._tab = tab
        self._panel_box.clear()
        with self._panel_box:
            self._panel = PANELS[tab](self._context)
        self._shown = None

    def _choose(self, path: str | None) -> None:
        if path is not None:
            self._context.settings["run"] = path

    def _set(self, name: str, value: object) -> None:
        self._context.settings[name] = value
        self._dark.set_value(self._context.dark)
        self._build()

    async def _update(self) -> None:
        """Show what is new; nothing where nothing is."""
        view = self._context.chosen
        if (view is None) != (self._panel is None):  # the first run came, or the last one went
            self._build()
        if view is None:
            return
        if (names := self._names()) != self._select.options:
            self._select.set_options(names, value=view.record["path"])
        changed, wanted = view.refresh(), (view.run, self._tab)
        is_due = time.monotonic() - self._drawn > SLOW_S if self._tab in SLOW else changed
        if wanted == self._shown and not is_due:
            return
        self._shown, self._drawn = wanted, time.monotonic()
        self._status.show(view)
        shown = self._panel.show(view)
        if inspect.isawaitable(shown):
            await shown
