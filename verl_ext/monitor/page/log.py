"""The log of a run: its last lines as they come, and a search over all of them."""

from __future__ import annotations

from datetime import datetime

from nicegui import ui

from verl_ext.monitor.page.context import PageContext
from verl_ext.monitor.view import RunView

LAST_LINES = 200
FOUND_LINES = 500
COLOURS = {
    "start": "text-green-600",
    "step": "text-blue-500",
    "evaluation": "text-amber-600",
    "checkpoint": "text-blue-700",
    "end": "text-green-700",
    "failure": "text-red-600",
    "ok": "text-green-600",
    "notice": "text-gray-500",
    "warning": "text-amber-700",
    "alarm": "text-red-700",
}


class LogPanel:
    """Builds itself where it is made.

    Args:
        context: of the page.
    """

    def __init__(self, context: PageContext) -> None:
        self._context, self._last = context, 0
        self._run: int | None = None
        self._generation = 0
        self._search = ui.input(context.say("Search the log")).props("clearable debounce=300").classes("w-96")
        self._search.props('data-testid="search"').on_value_change(self._find)
        self._log = ui.log(max_lines=LAST_LINES).classes("w-full h-96").props('data-testid="log"')
        columns = [
            {"name": name, "label": context.say(name.capitalize()), "field": name, "align": "left"}
            for name in ("time", "kind", "step", "text")
        ]
        self._table = (
            ui.table(columns=columns, rows=[], row_key="id", pagination=50)
            .classes("w-full")
            .props('data-testid="found"')
        )
        self._table.set_visibility(False)

    def show(self, view: RunView) -> None:
        """Append new events; another run, or another file in the place of this one's, clears the log first."""
        if (view.run, generation := view.record["generation"]) != (self._run, self._generation):
            self._run, self._generation, self._last = view.run, generation, 0
            self._log.clear()
        query = (
            "SELECT * FROM (SELECT * FROM events WHERE run = ? AND id > ? ORDER BY id DESC LIMIT ?) ORDER BY time, id"
        )
        for row in self._context.connection.execute(query, (self._run, self._last, LAST_LINES)).fetchall():
            self._last = max(self._last, row["id"])
            where = "" if row["step"] is None else f"step {row['step']}: "
            self._log.push(f"{moment(row['time'])}  {where}{row['text']}", classes=COLOURS.get(row["kind"], ""))

    def _find(self) -> None:
        wanted = (self._search.value or "").strip()
        self._table.set_visibility(bool(wanted))
        self._log.set_visibility(not wanted)
        if not wanted or self._run is None:
            return
        escaped = wanted.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        query = "SELECT * FROM events WHERE run = ? AND text LIKE ? ESCAPE '\\' ORDER BY time DESC LIMIT ?"
        found = self._context.connection.execute(query, (self._run, f"%{escaped}%", FOUND_LINES)).fetchall()
        self._table.rows = [
            {
                "id": row["id"],
                "time": moment(row["time"]),
                "kind": row["kind"],
                "step": row["step"],
                "text": row["text"],
            }
            for row in found
        ]


def moment(seconds: float) -> str:
    """A time for people, in this machine's zone; a number that is none is shown as it is."""
    try:
        return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):  # files of a run may hold anything
        return f"{seconds:g}"
