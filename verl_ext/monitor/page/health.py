"""The checklists and rules of `python -m verl_ext.health` for the run that is looked at."""

from __future__ import annotations

from nicegui import run, ui

from verl_ext.errors import UserError
from verl_ext.health.checklist import Point, checklists
from verl_ext.health.findings import Finding, Level
from verl_ext.health.run_files import RunFiles
from verl_ext.monitor.page.context import PageContext
from verl_ext.monitor.view import RunView

ICONS = {
    Level.OK: ("check_circle", "green"),
    Level.NOTICE: ("info", "grey"),
    Level.WARNING: ("warning", "orange"),
    Level.ALARM: ("error", "red"),
}


class HealthPanel:
    """Builds itself where it is made.

    Args:
        context: of the page.
    """

    def __init__(self, context: PageContext) -> None:
        self._context = context
        self._box = ui.column().classes("w-full gap-1").props('data-testid="health"')

    async def show(self, view: RunView) -> None:
        """Look at the run's files, in a thread: there may be many rows."""
        try:
            lists, findings = await run.io_bound(_look, view.directory)
        except UserError as error:
            lists, findings = {}, []
            self._box.clear()
            with self._box:
                ui.label(str(error)).classes("opacity-70")
            return
        self._box.clear()
        with self._box:
            for title, points in lists.items():
                ui.label(title).classes("text-lg mt-2")
                for point in points:
                    _line(point.seen and point.seen.level, point.text, point.seen.message if point.seen else "-")
            ui.label("Rules").classes("text-lg mt-2")
            for found in sorted(findings, key=lambda each: -each.level):
                _line(found.level, found.rule, found.sentence)


def _look(directory: object) -> tuple[dict[str, list[Point]], list[Finding]]:
    files = RunFiles.read(directory)  # type: ignore[arg-type]
    return checklists(files), list(files.findings().values())


def _line(level: Level | None, text: str, told: str) -> None:
    icon, colour = ICONS[level] if level is not None else ("remove", "grey")
    with ui.row().classes("items-center gap-2 no-wrap"):
        ui.icon(icon, color=colour)
        ui.label(text).classes("font-medium")
        ui.label(told).classes("opacity-70")
