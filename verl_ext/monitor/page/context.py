"""What all panels of one open page share."""

from __future__ import annotations

import sqlite3
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_ext.monitor.text import words
from verl_ext.monitor.view import RunView

STATUS_COLOURS = {"running": "green", "finished": "blue", "waiting": "amber", "failed": "red", "stopped": "grey"}
DOTS = {"running": "🟢", "finished": "🔵", "waiting": "🟡", "failed": "🔴", "stopped": "⚪"}
MOST_VIEWS = 8
"""Runs whose curves one page keeps in memory."""


@dataclass
class PageContext:
    """One open page.

    Attributes:
        connection: to the database; it is only read.
        root: below which runs lie.
        settings: what the browser remembers: run, tab, language, dark, smoothing, fold, compared.
    """

    connection: sqlite3.Connection
    root: Path
    settings: MutableMapping[str, Any]
    _views: dict[int, RunView] = field(default_factory=dict)

    @property
    def language(self) -> str:
        """en or zh."""
        return self.settings.get("language", "en")

    @property
    def dark(self) -> bool:
        """Whether the page is dark."""
        return bool(self.settings.get("dark", False))

    @property
    def smoothing(self) -> float:
        """Weight of the smoothing."""
        return float(self.settings.get("smoothing", 0.6))

    def say(self, text: str) -> str:
        """A text in the page's language."""
        return words(self.language, text)

    def runs(self) -> list[sqlite3.Row]:
        """All runs, those that run first, then the newest."""
        order = "ORDER BY status = 'running' DESC, (SELECT max(start) FROM attempts WHERE run = runs.id) DESC, path"
        return self.connection.execute(f"SELECT * FROM runs {order}").fetchall()

    def view(self, run: int) -> RunView:
        """A run's curves; those that were not looked at for longest are dropped."""
        found = self._views.pop(run, None) or RunView(self.connection, run, self.root)
        self._views[run] = found
        while len(self._views) > MOST_VIEWS:
            self._views.pop(next(iter(self._views)))
        return found

    @property
    def chosen(self) -> RunView | None:
        """The run that is looked at: the chosen one, else the first; None where there is none."""
        runs = self.runs()
        path = self.settings.get("run")
        row = next((each for each in runs if each["path"] == path), runs[0] if runs else None)
        return None if row is None else self.view(row["id"])
