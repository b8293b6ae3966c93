"""One run as a page shows it: curves that grow by what is new."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from verl_ext.errors import UserError
from verl_ext.health.context import LRSchedule, read_config, schedule_of
from verl_ext.monitor.curves.axis import CumulativeAxis
from verl_ext.monitor.curves.left import RECENT_STEPS, seconds_left
from verl_ext.monitor.curves.overview import Overview
from verl_ext.monitor.store.columns import Points, Row, columns_of, rows_after, unpack

STEP_METRIC = "train/loss"
"""In every row of a training step."""
MOST_ROWS = 20_000
"""Rows that are taken at a time while the monitor catches up with a long run."""
SCHEDULE_POINTS = 500
"""Of the learning rate that the recipe asks for, at most."""


@dataclass(frozen=True)
class Standing:
    """Where a run stands.

    Attributes:
        step: of its last row.
        total_steps: None where that is not known.
        seconds_left: at the recent speed; None where that is not known or the run does not run.
        latest: value by metric, the last of each.
    """

    step: int
    total_steps: int | None
    seconds_left: float | None
    latest: Mapping[str, float]


def is_number(value: Any) -> bool:
    """Whether a value of `metrics.jsonl` is a number; those that are not finite stand there as words."""
    return isinstance(value, (int, float)) or value in ("NaN", "Infinity", "-Infinity")


class RunView:
    """Reads a run from the database.

    Args:
        connection: to the database; it is only read.
        run: id.
        root: below which the run lies.
    """

    def __init__(self, connection: sqlite3.Connection, run: int, root: Path) -> None:
        self._connection, self.run, self._root = connection, run, root
        self._begin()

    def _begin(self) -> None:
        """Forget everything, and read the run."""
        self.record = self._record()
        self.directory = self._root / self.record["path"]
        self._last = self._packed = self.record["last_packed"]
        self._axis = CumulativeAxis(self._first_steps())
        self._overviews: dict[str, Overview] = {}
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=RECENT_STEPS)  # attempt, step, time
        self.latest: dict[str, float] = {}
        self.steps_per_epoch: int | None = None
        self.metrics = self._packed_metrics()
        self._learn_packed()
        self.refresh()

    @property
    def starts(self) -> dict[int, int]:
        """Where each attempt begins on the axis."""
        return self._axis.starts

    def last_attempt(self) -> sqlite3.Row | None:
        """The run's last attempt; None before the first."""
        query = "SELECT * FROM attempts WHERE run = ? ORDER BY attempt DESC LIMIT 1"
        return self._connection.execute(query, (self.run,)).fetchone()

    def refresh(self) -> bool:
        """Take what is new; whether there was anything."""
        former, found = self.record, self._record()
        if found is None:  # the run is gone, and what was read of it is all there is
            return False
        self.record = found
        if self.record["record"] != former["record"]:
            self._axis.first_steps = self._first_steps()
        if self.record["generation"] != former["generation"]:  # another file has taken the place of the first
            self._begin()
            return True
        changed = self.record["record"] != former["record"]
        while True:
            self._last, rows = rows_after(self._connection, self.run, self._last, MOST_ROWS)
            self._take(rows)
            changed |= bool(rows)
            if len(rows) < MOST_ROWS:
                self._packed = min(self.record["last_packed"], self._last)
                return changed

    def curve(self, metric: str) -> Overview:
        """All of a metric, in few points."""
        if metric not in self._overviews:
            self._overviews[metric] = self._read(metric)
        return self._overviews[metric]

    def standing(self) -> Standing:
        """Where the run stands."""
        recent = [(step, time) for attempt, step, time in self._recent if attempt == self._recent[-1][0]]
        total = self.record["total_steps"]
        left = seconds_left(recent, total) if self.record["status"] == "running" else None
        return Standing(self._recent[-1][1] if self._recent else 0, total, left, self.latest)

    def schedule(self) -> LRSchedule | None:
        """The learning rate that the recipe asks for; None where none is fixed, or not known."""
        try:
            config = read_config(self.directory / "config.yaml")
            return schedule_of(config, self.record["total_steps"], self.steps_per_epoch)
        except (UserError, KeyError, TypeError):  # a configuration of another version has other keys
            return None

    def schedule_points(self) -> list[tuple[int, float]]:
        """That learning rate as points on the axis of the last attempt, `SCHEDULE_POINTS` at most; none without one."""
        schedule, total = self.schedule(), self.record["total_steps"]
        if schedule is None or not total:
            return []
        shift = self._axis.shift_of(max(self.starts, default=1))
        steps = np.unique(np.linspace(1, total, min(total, SCHEDULE_POINTS)).astype(int)).tolist()
        return [(step + shift, schedule.at(step)) for step in steps]

    def _record(self) -> sqlite3.Row:
        return self._connection.execute("SELECT * FROM runs WHERE id = ?", (self.run,)).fetchone()

    def _first_steps(self) -> dict[int, int]:
        query = "SELECT attempt, first_step FROM attempts WHERE run = ? AND first_step IS NOT NULL"
        return dict(map(tuple, self._connection.execute(query, (self.run,))))

    def _packed_metrics(self) -> dict[str, None]:
        query = "SELECT DISTINCT metric FROM columns WHERE run = ?"
        return {name: None for (name,) in self._connection.execute(query, (self.run,))}

    def _learn_packed(self) -> None:
        """Learn where the attempts lie, and what was last."""
        query = "SELECT attempt, min(step), max(step) FROM training_logs WHERE run = ? AND id <= ? GROUP BY attempt"
        for attempt, lowest, highest in self._connection.execute(query, (self.run, self._packed)):
            self._axis.learn(attempt, lowest, highest)
        query = (
            "SELECT attempt, step, time, metrics FROM training_logs WHERE run = ? AND id <= ? ORDER BY id DESC LIMIT ?"
        )
        found = self._connection.execute(query, (self.run, self._packed, 4 * RECENT_STEPS)).fetchall()
        for attempt, step, time, text in reversed(found):
            self._note((attempt, step, time, orjson.loads(text)))

    def _take(self, rows: list[Row]) -> None:
        for attempt, step, _, _ in rows:
            self._axis.learn(attempt, step, step)
        for row in rows[-4 * RECENT_STEPS :]:
            self._note(row)
        for name, points in columns_of(rows).items():
            self.metrics.setdefault(name)
            if name in self._overviews:
                self._add(self._overviews[name], points)

    def _note(self, row: Row) -> None:
        attempt, step, time, metrics = row
        numbers = {name: float(value) for name, value in metrics.items() if is_number(value)}
        self.latest.update(numbers)
        if STEP_METRIC in metrics:
            self._recent.append((attempt, step, time))
        if numbers.get("train/epoch"):
            self.steps_per_epoch = round(step / numbers["train/epoch"])

    def _read(self, metric: str) -> Overview:
        overview = Overview()
        for part in unpack(self._connection, self.run, metric, self._packed):
            self._add(overview, part)
        query = (
            "SELECT attempt, step, time, metrics FROM training_logs WHERE run = ? AND id > ? AND id <= ? ORDER BY id"
        )
        found = self._connection.execute(query, (self.run, self._packed, self._last))
        rows = [(attempt, step, time, orjson.loads(text)) for attempt, step, time, text in found]
        if metric in (columns := columns_of(rows)):
            self._add(overview, columns[metric])
        return overview

    def _add(self, overview: Overview, points: Points) -> None:
        overview.add(self._axis.at(points.attempts, points.steps), points.values)
