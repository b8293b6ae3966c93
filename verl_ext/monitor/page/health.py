"""The checklists and rules of `python -m verl_ext.health` for the run that is looked at."""

from __future__ import annotations

import time
from pathlib import Path

from nicegui import run, ui

from verl_ext.errors import first_line_of
from verl_ext.health.checklist import ChecklistItem, checklists
from verl_ext.health.rule import Finding, Level
from verl_ext.health.run_directory import RunDirectory
from verl_ext.metrics.jsonl import METRICS_FILE
from verl_ext.metrics.run_record import RUN_FILE
from verl_ext.monitor.page.context import PageContext
from verl_ext.monitor.view import RunView

ICONS = {
    Level.OK: ("check_circle", "green"),
    Level.NOTICE: ("info", "grey"),
    Level.WARNING: ("warning", "orange"),
    Level.ALARM: ("error", "red"),
}


FILES = (METRICS_FILE, RUN_FILE)


class HealthPanel:
    """Builds itself where it is made.

    Args:
        context: of the page.
    """

    def __init__(self, context: PageContext) -> None:
        self._context = context
        self._state: tuple[object, ...] | None = None
        self._box = ui.column().classes("w-full gap-1").props('data-testid="health"')

    async def show(self, view: RunView) -> None:
        """Look at the run's files, in a thread: there may be many rows."""
        if (state := _state(view.directory)) == self._state:
            return
        try:
            lists, findings = await run.io_bound(_look, view.directory)
        except Exception as error:  # the files of a run may be of any kind, and the page goes on
            self._box.clear()
            with self._box:
                ui.label(first_line_of(error)).classes("opacity-70")
            return
        self._state = state
        self._box.clear()
        with self._box:
            for title, items in lists.items():
                ui.label(title).classes("text-lg mt-2")
                for item in items:
                    _line(item.result and item.result.level, item.text, item.result.message if item.result else "-")
            ui.label("Rules").classes("text-lg mt-2")
            for found in sorted(findings, key=lambda each: -each.level):
                _line(found.level, found.rule, found.sentence)


def _state(directory: Path) -> tuple[object, ...]:
    """What changes when there is anything new to see; for a live run also every half minute, as silence may grow."""
    stats = [(path.stat().st_size, path.stat().st_mtime) for name in FILES if (path := directory / name).exists()]
    return directory, *stats, int(time.time() / 30)


def _look(directory: Path) -> tuple[dict[str, list[ChecklistItem]], list[Finding]]:
    found = RunDirectory.read(directory)
    return checklists(found), list(found.findings().values())


def _line(level: Level | None, text: str, told: str) -> None:
    icon, colour = ICONS[level] if level is not None else ("remove", "grey")
    with ui.row().classes("items-center gap-2 no-wrap"):
        ui.icon(icon, color=colour)
        ui.label(text).classes("font-medium")
        ui.label(told).classes("opacity-70")
