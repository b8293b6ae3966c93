"""Brings what is new in the files of runs into the database."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import orjson

from verl_ext.console import warn
from verl_ext.errors import UserError, one_line
from verl_ext.metrics.jsonl import METRICS_FILE
from verl_ext.metrics.run_record import RUN_FILE, STATUSES
from verl_ext.monitor.store.columns import PACKED_ROWS, Row, pack, rows_after
from verl_ext.monitor.store.evaluations import take_evaluations
from verl_ext.monitor.store.events import events_of_row, take_attempts, take_events
from verl_ext.monitor.store.lines import read_new

MOST = 1 << 53
"""Greater numbers of steps are none."""
TABLES_OF_A_RUN = ("training_logs", "columns", "events", "evaluations", "attempts")
"""With a column `run`."""


class Ingest:
    """Writes into the database; one of it, in one thread.

    Args:
        connection: to the database.
        root: below which runs lie.
    """

    def __init__(self, connection: sqlite3.Connection, root: Path) -> None:
        self._connection, self._root = connection, root
        self._told: set[str] = set()

    def find_runs(self) -> list[int]:
        """Look for runs below the root and read their `run.json`; returns their ids.

        Runs whose directories are gone are forgotten, unless a directory above them cannot be listed: a network disk
        that fails for one look must not cost the database.
        """
        ids = []
        directories, errors = run_directories(self._root)
        for error in errors:
            if error.filename == str(self._root) or not isinstance(error, FileNotFoundError):  # else just deleted
                self.tell_once(f"{error.filename} cannot be listed ({error.strerror}); its runs are shown as last read")
        for directory in directories:
            try:
                with self._connection:
                    if (run := self._take_record(directory)) is not None:
                        take_evaluations(self._connection, run, directory)
                        ids.append(run)
            except Exception as error:  # files of any kind may lie there, and people look at the other runs
                self.tell_once(f"{directory} cannot be followed: {one_line(error)}")
        self._forget_missing({*directories}, [Path(error.filename) for error in errors])
        return ids

    def tell_once(self, message: str) -> None:
        """Warn of something, the first time."""
        if message not in self._told:
            self._told.add(message)
            warn(message)

    def _forget_missing(self, found: set[Path], unlisted: list[Path]) -> None:
        """Delete runs whose directories were not found; those below a directory that was not listed may be there."""
        with self._connection:
            for run, path in self._connection.execute("SELECT id, path FROM runs").fetchall():
                directory = self._root / path
                if directory not in found and not any(directory.is_relative_to(each) for each in unlisted):
                    self._empty(run)
                    self._connection.execute("DELETE FROM runs WHERE id = ?", (run,))

    def running(self) -> list[int]:
        """Runs that were running when their records were last read."""
        return [run for (run,) in self._connection.execute("SELECT id FROM runs WHERE status = 'running'")]

    def take(self, run: int) -> bool:
        """Read on in the files of a run; whether there may be more at once."""
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")  # offsets are read where nobody else writes them
            row = self._connection.execute("SELECT * FROM runs WHERE id = ?", (run,)).fetchone()
            if row is None:
                return False
            directory = self._root / row["path"]
            self._take_record(directory)
            take_events(self._connection, row, directory)
            return self._take_metrics(row, directory / METRICS_FILE)

    def take_all(self, run: int) -> None:
        """The same until nothing is left."""
        while self.take(run):
            pass

    def take_one(self, directory: Path) -> int:
        """Read one run from beginning to end; its id.

        Raises:
            UserError: its `run.json` is no record of a run.
        """
        with self._connection:
            run = self._take_record(directory)
            if run is None:
                raise UserError(f"{directory / RUN_FILE} is no record of a run; delete it or put it aside")
            take_evaluations(self._connection, run, directory)
        self.take_all(run)
        return run

    def _take_record(self, directory: Path) -> int | None:
        """Read `run.json`; the run's id, None where it is no run record (yet)."""
        path = str(directory.relative_to(self._root))
        try:
            text = (directory / RUN_FILE).read_text()
            record = orjson.loads(text)
        except (OSError, ValueError):
            record, text = None, ""
        known = self._connection.execute("SELECT id, record FROM runs WHERE path = ?", (path,)).fetchone()
        if not isinstance(record, dict) or record.get("status") not in STATUSES:
            return None if known is None else known["id"]
        if known is not None and known["record"] == text:
            return known["id"]
        names = ("project", "experiment", "stage", "recipe", "status", "total_steps")
        values = [record.get(name) for name in names]
        self._connection.execute(
            "INSERT INTO runs (path, record, project, experiment, stage, recipe, status, total_steps) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (path) DO UPDATE SET record = excluded.record, "
            + ", ".join(f"{name} = excluded.{name}" for name in names),
            [path, text, *values],
        )
        [run] = self._connection.execute("SELECT id FROM runs WHERE path = ?", (path,)).fetchone()
        take_attempts(self._connection, run, record.get("attempts") or [])
        return run

    def _take_metrics(self, row: sqlite3.Row, path: Path) -> bool:
        run, new = row["id"], read_new(path, row["metrics_offset"], row["metrics_head"])
        if new is None:
            return False
        if new.is_other:
            self._forget(run)
        rows, unreadable = parse_lines(new.lines)
        [newest] = self._connection.execute("SELECT coalesce(max(id), 0) FROM training_logs").fetchone()
        self._connection.executemany(
            "INSERT INTO training_logs VALUES (?, ?, ?, ?, ?, ?)",
            (
                (newest + place, run, attempt, step, time, orjson.dumps(metrics).decode())
                for place, (attempt, step, time, metrics) in enumerate(rows, start=1)
            ),
        )
        events = (event for each in rows for event in events_of_row(each))
        self._connection.executemany("INSERT INTO events VALUES (NULL, ?, ?, ?, ?, ?, ?)", ((run, *e) for e in events))
        self._connection.execute(
            "UPDATE runs SET metrics_offset = ?, metrics_head = ?, unreadable = unreadable + ? WHERE id = ?",
            (new.offset, new.head, unreadable, run),
        )
        self._pack(run, newest, rows)
        return bool(new.lines)

    def _pack(self, run: int, before: int, fresh: list[Row]) -> None:
        """Make columns of what is not packed yet, as far as it fills them.

        Args:
            run: whose rows they are.
            before: id in front of the first of `fresh`.
            fresh: rows that were just written, so that they need not be read again.
        """
        [packed] = self._connection.execute("SELECT last_packed FROM runs WHERE id = ?", (run,)).fetchone()
        query = "SELECT id FROM training_logs WHERE run = ? AND id > ? AND id <= ? ORDER BY id"
        older = [each for (each,) in self._connection.execute(query, (run, packed, before))]
        if len(older) + len(fresh) < PACKED_ROWS:
            return
        rows = [*rows_after(self._connection, run, packed, len(older))[1], *fresh] if older else fresh
        ids = [*older, *range(before + 1, before + 1 + len(fresh))]
        for start in range(0, len(rows) - PACKED_ROWS + 1, PACKED_ROWS):
            end = start + PACKED_ROWS
            pack(self._connection, run, ids[end - 1], rows[start:end])

    def _forget(self, run: int) -> None:
        """The file is another one: what was read of it does not count."""
        self._empty(run)
        reset = (
            "UPDATE runs SET last_packed = 0, unreadable = 0, generation = generation + 1, record = '', "
            "events_offset = 0, events_head = '' WHERE id = ?"
        )
        self._connection.execute(reset, (run,))

    def _empty(self, run: int) -> None:
        """Delete what the tables have of a run, but for the run itself."""
        for table in TABLES_OF_A_RUN:
            self._connection.execute(f"DELETE FROM {table} WHERE run = ?", (run,))


def run_directories(root: Path) -> tuple[list[Path], list[OSError]]:
    """Directories below a root that have a `run.json`, and the errors of those that could not be listed.

    Checkpoints are not looked into: there are no runs in them, and many files.
    """
    found: list[Path] = []
    errors: list[OSError] = []
    for directory, below, names in os.walk(root, onerror=errors.append):
        below[:] = [name for name in below if not name.startswith(("global_step_", "wandb"))]
        if RUN_FILE in names:
            found.append(Path(directory))
    return sorted(found), errors


def parse_lines(lines: list[bytes]) -> tuple[list[Row], int]:
    """Lines of `metrics.jsonl` as rows, and how many were none."""
    rows: list[Row] = []
    unreadable = 0
    for line in lines:
        try:
            row: dict[str, Any] = orjson.loads(line)
            step, attempt, time = row.pop("step"), row.pop("attempt"), row.pop("time")
            if not all(isinstance(each, int) and abs(each) < MOST for each in (step, attempt)):
                raise ValueError("no number of a step or an attempt")
            rows.append((attempt, step, float(time), row))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            unreadable += bool(line.strip())
    return rows, unreadable
