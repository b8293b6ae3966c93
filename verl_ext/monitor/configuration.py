"""The tab of a run's attempts: where and how each was started, and with which settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from nicegui import ui
from nicegui.events import ValueChangeEventArguments

from verl_ext.metrics.run_record import seconds_of
from verl_ext.monitor.messages import translate_message
from verl_ext.monitor.panels import GRID, DataTable, Panel, clip, columns_of, data_table, flatten, heading, tag
from verl_ext.monitor.run_files import config_error, config_or_empty
from verl_ext.monitor.text import format_time

COMMIT_CHARACTERS = 10
ATTEMPT_COLUMNS = ("Attempt", "Started", "Ended", "Steps", "Ranks", "Host", "Devices", "Commit", "Reason")
KEY_COLUMNS = ("Key", "Value", "Default", "Previous attempt")
Attempt = Mapping[str, Any]


class ConfigurationPanel(Panel):
    """The attempts of a run, and command, packages, environment and settings of one of them."""

    period_s = 3.0

    def build(self) -> None:
        """Create the tables."""
        self._shown: object = None
        self._tables: dict[str, DataTable] = {}
        self._attempts: list[Attempt] = []
        self._config: dict[str, str] = {}
        heading(self.say("Attempts"))
        self._table("attempts", ATTEMPT_COLUMNS, "Attempt")
        with ui.row().classes("w-full items-center gap-4"):
            self._select = tag(ui.select([], label=self.say("Attempt")).classes("w-full sm:w-48"), "attempt")
            self._select.on_value_change(self._draw)
        with ui.row().classes("w-full items-center gap-2"):
            heading(self.say("Command"))
            copy = ui.button(icon="content_copy", on_click=self._copy)
            tag(copy.props("flat dense size=sm"), "copy command", **{"aria-label": self.say("Copy")})
        self._command = tag(ui.label().classes("w-full text-sm rounded p-2 bg-gray-100 dark:bg-gray-800"), "command")
        self._command.style("white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace")
        with ui.element("div").classes(GRID):
            for name in ("Packages", "Environment"):
                with ui.column().classes("w-full"):
                    heading(self.say(name))
                    self._table(name.lower(), ("Name", "Value"), "Name")
        heading(self.say("Settings"))
        with ui.row().classes("w-full items-center gap-4"):
            search = ui.input(self.say("Search"), value=self.state.setting_search)
            search.props("clearable dense debounce=200").classes("w-full sm:w-80")
            tag(search, "setting search").on_value_change(
                lambda event: self.go(push=False, setting_search=event.value or "")
            )
            changed = ui.switch(self.say("Changed settings only"), value=bool(self.state.changed))
            self._changed = tag(changed, "changed only").on_value_change(self._choose_changed)
        keys = self._table("settings", KEY_COLUMNS, "Key", pagination=25)
        search.bind_value_to(keys, "filter", forward=lambda text: text or "")

    def _copy(self) -> None:
        ui.clipboard.write(self._command.text)

    def _table(self, name: str, columns: Sequence[str], key: str, pagination: int | None = None) -> DataTable:
        listed = columns_of(columns, self.say)
        self._tables[name] = data_table(name, listed, key, self.say, "Not recorded", pagination=pagination)
        return self._tables[name]

    def redraw(self) -> None:
        """Read the record and the configuration, and draw them if they have changed."""
        run = self.run
        if run is None:
            return
        directory = self.follower.directory(run)
        config, error = flatten(config_or_empty(directory)), config_error(directory)
        if (run.id, run.record, config, error) == self._shown:
            return
        self._shown = run.id, run.record, config, error
        self._tables["settings"].props["no-data-label"] = error or self.say("Not recorded")
        self._attempts, self._config = attempts_of(run.record), config
        self._tables["attempts"].rows = [attempt_row(each, self.state.language) for each in self._attempts]
        self._offer_attempts([each["attempt"] for each in self._attempts])
        self._draw()

    def _offer_attempts(self, numbers: list[int]) -> None:
        """Keep a chosen earlier attempt; otherwise choose the last one, also when the run is restarted."""
        chosen = self._select.value
        was_last = chosen == next(reversed(self._select.options), None)
        kept = chosen in numbers and not was_last
        self._select.set_options(numbers, value=chosen if kept else next(reversed(numbers), None))

    def _choose_changed(self, event: ValueChangeEventArguments) -> None:
        self.go(push=False, changed="1" if event.value else "")
        self._draw()

    def _draw(self) -> None:
        """Show the chosen attempt."""
        later = [each for each in self._attempts if each["attempt"] > (self._select.value or 0)]
        attempt = next((each for each in self._attempts if each["attempt"] == self._select.value), {})
        self._command.set_text(str(attempt.get("command") or "-"))
        for name in ("packages", "environment"):
            values = mapping_of(attempt.get(name))
            self._tables[name].rows = [{"Name": key, "Value": str(value)} for key, value in values.items()]
        rows = setting_rows(config_before(self._config, later), attempt)
        changed = bool(self._changed.value)
        self._tables["settings"].rows = [
            row for row in rows if not changed or row["Default"] or row["Previous attempt"]
        ]


def attempts_of(record: str) -> list[Attempt]:
    """Return the attempts in the text of a `run.json`, in order."""
    try:
        found = orjson.loads(record)["attempts"]
        attempts = [each for each in found if isinstance(each, dict) and type(each.get("attempt")) is int]
    except (ValueError, TypeError, KeyError):  # a run's files may contain anything
        return []
    return sorted(attempts, key=lambda each: each["attempt"])


def attempt_row(attempt: Attempt, language: str) -> dict[str, Any]:
    """Return a row of the table of attempts."""
    start, end = seconds_of(attempt.get("start")), seconds_of(attempt.get("end"))
    first, last = attempt.get("first_step"), attempt.get("last_step")
    devices = attempt.get("device_names")
    return {
        "Attempt": attempt["attempt"],
        "Started": "" if start is None else format_time(start),
        "Ended": "" if end is None else format_time(end),
        "Steps": "" if first is None else f"{first} – {'…' if last is None else last}",
        "Ranks": _text(attempt.get("world_size")),
        "Host": _text(attempt.get("host")),
        "Devices": count_names(devices) if isinstance(devices, list) else "",
        "Commit": _text(attempt.get("git_commit"))[:COMMIT_CHARACTERS],
        "Reason": translate_message(language, _text(attempt.get("exit_reason"))),
    }


def count_names(names: Sequence[Any]) -> str:
    """Join names, with the number of repeated ones, such as `8 × NVIDIA H100`."""
    counts = {str(name): names.count(name) for name in names}
    return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())


def config_before(config: Mapping[str, str], later: Sequence[Attempt]) -> dict[str, str]:
    """Return the settings before some attempts: those of the latest without what these attempts changed."""
    found = dict(config)
    for attempt in reversed(later):
        for key, change in mapping_of(attempt.get("config_changes")).items():
            found[key] = _previous(change)
    return found


def setting_rows(config: Mapping[str, str], attempt: Attempt) -> list[dict[str, str]]:
    """Return a row for each setting of an attempt; a default or a previous value is only given if it differs."""
    defaults, changes = mapping_of(attempt.get("config_defaults")), mapping_of(attempt.get("config_changes"))
    return [
        {
            "Key": key,
            "Value": clip(value),
            "Default": clip(_value(defaults[key])) if key in defaults else "",
            "Previous attempt": clip(_previous(changes[key])) if key in changes else "",
        }
        for key, value in config.items()
    ]


def mapping_of(value: Any) -> dict[str, Any]:
    """Return a value if it is a mapping; a run's files may contain anything."""
    return value if isinstance(value, dict) else {}


def _previous(change: Any) -> str:
    return _value(change[0]) if isinstance(change, list) and change else "-"


def _value(value: Any) -> str:
    """Return a value as `flatten` does."""
    return next(iter(flatten({"": value}).values()))


def _text(value: Any) -> str:
    return "" if value is None else str(value)
