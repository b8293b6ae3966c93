"""Tabs that show files of a run: checkpoints, health, and log."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nicegui import run as background
from nicegui import ui

from verl_ext.checkpoint.inspection import list_all, read_retention
from verl_ext.checkpoint.manifest import EXPORT, has_export
from verl_ext.console_log import CONSOLE_LOG
from verl_ext.errors import first_line_of
from verl_ext.files import format_bytes
from verl_ext.health.checklist import ChecklistItem, checklists
from verl_ext.health.rule import Finding, Level
from verl_ext.health.run_directory import RunDirectory
from verl_ext.metrics.jsonl import EVENTS_FILE, METRICS_FILE
from verl_ext.metrics.run_record import RUN_FILE
from verl_ext.monitor.colors import LEVELS, text_classes
from verl_ext.monitor.database import LogEvent, RunInfo
from verl_ext.monitor.messages import translate_event, translate_message
from verl_ext.monitor.panels import Panel, columns_of, data_table, heading, tag
from verl_ext.monitor.run_files import stamp_of
from verl_ext.monitor.text import format_path, format_time

LAST_LINES = 200
"""Number of log lines to show."""
FOUND_LINES = 500
TAIL_BYTES = 256 * 1024
"""Number of bytes at the end of the console to show lines of."""
LEVEL_ICONS = {"ok": "check_circle", "notice": "info", "warning": "warning", "alarm": "error"}
EVENT_COLORS = {
    "start": "green",
    "step": "blue",
    "evaluation": "amber",
    "checkpoint": "blue",
    "end": "green",
    "failure": "red",
    "ok": "green",
    "notice": "grey",
    "warning": "amber",
    "alarm": "red",
}


class CheckpointsPanel(Panel):
    """Checkpoints on disk, and why rotation keeps each."""

    period_s = 5.0

    def build(self) -> None:
        """Create the table."""
        names = ("Step", "Size", "Saved", "State", "Kept because")
        columns = [column | {"sortable": False} for column in columns_of(names, self.say)]
        self._table = data_table("checkpoints", columns, "Step", self.say)

    async def show(self) -> None:
        """Read the disk in a thread, because it may be slow."""
        run = self.run
        if run is None:
            return
        directory, now = self.follower.directory(run), int(time.monotonic() / self.period_s)
        read = partial(checkpoint_rows, directory)
        rows = await background.io_bound(self.follower.files.get, ("checkpoints", directory), now, read)
        if rows is None:  # the tab was closed meanwhile
            return
        shown = [self._translate(row) for row in rows]
        if shown != self._table.rows:
            self._table.rows = shown

    def _translate(self, row: dict[str, Any]) -> dict[str, Any]:
        state, reason = (translate_message(self.state.language, row[name]) for name in ("State", "Kept because"))
        return row | {"State": state + row["Export"], "Kept because": reason}


def checkpoint_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return a row of the table for each checkpoint, including leftovers."""
    try:
        found = list_all(run_dir, *read_retention(run_dir))
    except Exception as error:  # a run's files may contain anything
        empty = dict.fromkeys(("Size", "Saved", "Export", "Kept because"), "")
        return [{"Step": "-", "State": first_line_of(error), **empty}]
    return [
        {
            "Step": format_path(Path(each.path.name)),
            "Size": format_bytes(each.num_bytes),
            "Saved": format_time(each.manifest.time) if each.manifest is not None and each.manifest.time else "",
            "State": each.state,
            "Export": f", {EXPORT}/" if has_export(each.path) else "",
            "Kept because": each.retention,
        }
        for each in found
    ]


class HealthPanel(Panel):
    """The checklists and rules of `python -m verl_ext.health`."""

    period_s = 5.0

    def build(self) -> None:
        """Create the box for the lists."""
        self._shown: object = None
        self._box = tag(ui.column().classes("w-full gap-1"), "health")
        with self._box:
            ui.spinner()  # until the first check

    async def show(self) -> None:
        """Check the run if its files have changed, for at most a tenth of the time: a long run has many rows."""
        run = self.run
        if run is None:
            return
        directory = self.follower.directory(run)
        key, look = ("health", directory), partial(_look, directory)
        found = await background.io_bound(self.follower.files.get, key, _files_state(directory), look, 10.0)
        if found is None or found == self._shown:  # None if the tab was closed meanwhile
            return
        self._shown = found
        self._box.clear()
        with self._box:
            if isinstance(found, str):
                ui.label(found).classes("opacity-70")
            else:
                self._draw(*found)

    def _draw(self, lists: dict[str, list[ChecklistItem]], findings: list[Finding]) -> None:
        say = partial(translate_message, self.state.language)
        for title, items in lists.items():
            heading(say(title), "text-lg mt-2")
            for item in items:
                result = item.result
                _line(result.level if result else None, say(item.text), say(result.message) if result else "-")
        heading(self.say("Rules"), "text-lg mt-2")
        for found in sorted(findings, key=lambda each: -each.level):
            _line(found.level, found.rule, say(found.sentence))


def _files_state(directory: Path) -> object:
    """Return a value that changes with the files, and every half minute, because the run may have stopped logging."""
    paths = [directory / name for name in (METRICS_FILE, RUN_FILE, EVENTS_FILE)]
    return [stamp_of(path) for path in paths if path.exists()], int(time.time() / 30)


def _look(directory: Path) -> tuple[dict[str, list[ChecklistItem]], list[Finding]] | str:
    """Return the checklists and findings of a run, or an error message."""
    try:
        run = RunDirectory.read(directory)
        return checklists(run), list(run.findings().values())
    except Exception as error:  # a run's files may contain anything
        return first_line_of(error)


def _line(level: Level | None, name: str, message: str) -> None:
    word = "" if level is None else level.word
    with ui.row().classes("items-start gap-2 sm:flex-nowrap"):
        ui.icon(LEVEL_ICONS.get(word, "remove"), color=LEVELS.get(word, "neutral")).classes("mt-1")
        ui.label(name).classes("font-medium sm:whitespace-nowrap")
        ui.label(message).classes("opacity-70")


class LogPanel(Panel):
    """The last lines of a run's log, live, and a search over all lines: events of the run, or its console."""

    @property
    def period_s(self) -> float:  # type: ignore[override]
        """The console may have new lines at any time, and events only with other news of the run."""
        return 1.0 if self._source.value == "console" else 0.0

    def build(self) -> None:
        """Create the log and the table of search results."""
        self._last = 0
        self._shown: object = None
        self._console: list[str] = []  # lines of the console in the log
        sources = {name: self.say(name.capitalize()) for name in ("events", "console")}
        chosen = self.state.log_source if self.state.log_source in sources else "events"
        source = ui.toggle(sources, value=chosen).props("no-caps")
        self._source = tag(source, "log source").on_value_change(self._switch)
        search = ui.input(self.say("Search the log"), value=self.state.log_search)
        search.props("clearable debounce=300").classes("w-full sm:w-96")
        self._search = tag(search, "search").on_value_change(self._choose)
        self._log = tag(ui.log(max_lines=LAST_LINES).classes("w-full h-[32rem]"), "log")
        columns = columns_of(("time", "kind", "step", "text"), lambda name: self.say(name.capitalize()))
        self._table = data_table("found", columns, "id", self.say, "No matching rows", pagination=50)
        self._table.set_visibility(False)

    async def show(self) -> None:
        """Append new lines and search in them."""
        run = self.run
        if run is None:
            return
        if self._source.value == "console":
            await self._show_console(self.follower.directory(run) / CONSOLE_LOG)
            await self._find()  # even without new lines, because the last result may be older
        elif self._show_events(run):
            await self._find()

    def _show_events(self, run: RunInfo) -> bool:
        """Append new events, and return whether there are any; another run or metrics file clears the log first."""
        is_other = self._shown != (run.id, run.generation)
        if is_other:
            self._shown, self._last = (run.id, run.generation), 0
            self._log.clear()
        events = self.follower.reader.last_events(run.id, self._last, LAST_LINES)
        for number, event in events:
            self._last = max(self._last, number)
            self._log.push(self._line_of(event), classes=text_classes(EVENT_COLORS.get(event.kind, "grey")))
        return is_other or bool(events)

    def _line_of(self, event: LogEvent) -> str:
        where = "" if event.step is None else f"{self.say('step {}').format(event.step)}: "
        return f"{format_time(event.time)}  {where}{translate_event(self.state.language, event)}"

    async def _show_console(self, path: Path) -> None:
        stamp = stamp_of(path) if path.exists() else None
        if self._shown == (path, stamp):
            return
        self._shown = path, stamp
        lines = await background.io_bound(last_lines, path, LAST_LINES) if stamp else [self.say("Nothing yet")]
        if lines is not None:  # None if the tab was closed meanwhile
            self._append(lines)

    def _append(self, lines: list[str]) -> None:
        """Show lines of the console; those that the log has already stay, so that their text can be selected."""
        kept, without_last = num_repeated(self._console, lines), num_repeated(self._console[:-1], lines)
        if without_last > kept:  # the last line was incomplete
            self._log.remove(len(self._console) - 1)
            self._console.pop()
            kept = without_last
        elif not kept:
            self._log.clear()
            self._console.clear()
        for line in lines[kept:]:
            self._log.push(line)
        self._console = [*self._console, *lines[kept:]][-LAST_LINES:]

    async def _switch(self) -> None:
        self._log.clear()
        self._console.clear()
        self._shown, self._last = None, 0
        await self._choose()
        await self.show()

    async def _choose(self) -> None:
        """Note source and search in the address, and search."""
        source = "" if self._source.value == "events" else self._source.value
        self.go(push=False, log_source=source, log_search=(self._search.value or "").strip())
        await self._find()

    async def _find(self) -> None:
        """List the lines with the searched text; the console is read for at most a tenth of the time."""
        searched = wanted, source = self._searched
        self._table.set_visibility(bool(wanted))
        self._log.set_visibility(not wanted)
        run = self.run  # read once, because the follower may drop it at any time
        if not wanted or run is None:
            return
        if source == "console":
            path = self.follower.directory(run) / CONSOLE_LOG
            find, stamp = partial(find_lines, path, wanted, FOUND_LINES), stamp_of(path) if path.exists() else ""
            lines = await background.io_bound(self.follower.files.get, ("found", path, wanted), stamp, find, 10.0)
            if lines is None or searched != self._searched:
                return
            rows = [{"id": number, "kind": self.say("line {}").format(number), "text": line} for number, line in lines]
        else:
            found = self.follower.reader.search_events(run.id, wanted, FOUND_LINES)
            rows = [
                {"id": number, "time": format_time(each.time), "kind": self.say(each.kind), "step": each.step}
                | {"text": translate_event(self.state.language, each)}
                for number, each in found
            ]
        if rows != self._table.rows:
            self._table.rows = rows

    @property
    def _searched(self) -> tuple[str, str]:
        """The searched text, and where it is searched."""
        return (self._search.value or "").strip(), self._source.value


def num_repeated(shown: Sequence[str], lines: Sequence[str]) -> int:
    """Return how many of the first lines are the last shown ones."""
    sizes = range(min(len(shown), len(lines)), 0, -1)
    return next((size for size in sizes if shown[-size:] == lines[:size]), 0)


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a text file with text, at most `count` and `TAIL_BYTES`; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            start = max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0)
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines[1 if start else 0 :] if line][-count:]


def find_lines(path: Path, wanted: str, count: int) -> list[tuple[int, str]]:
    """The last lines of a text file that contain a text, in any case, with their numbers from 1."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = ((number, line.rstrip()) for number, line in enumerate(file, 1) if wanted.lower() in line.lower())
            return list(deque(found, maxlen=count))
    except OSError:
        return []
