"""The monitor's SQLite database: tables, and all queries of the follower and the pages.

It is a cache of the runs' files and may be deleted at any time. Another version of the monitor empties it.
"""

from __future__ import annotations

import hashlib
import socket
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from verl_ext.errors import UserError
from verl_ext.files import user_cache_dir
from verl_ext.health.history import rewinds
from verl_ext.health.trend import Array
from verl_ext.metrics.jsonl import KEY_COLUMNS, MetricsRow, parse_object
from verl_ext.monitor.curves import RunCurves

VERSION = 15
SQLITE_HEADER = b"SQLite format 3\0"
OWN_TABLES = {"runs", "events"}
"""Tables of all versions."""
SCHEMA = """
CREATE TABLE runs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused: open pages know a run by its id
    path TEXT NOT NULL UNIQUE,             -- relative to the root
    project TEXT, experiment TEXT, stage TEXT, recipe TEXT,
    status TEXT NOT NULL,
    total_steps INTEGER,
    record TEXT NOT NULL DEFAULT '',       -- run.json as it was last read
    config_stamp TEXT NOT NULL DEFAULT '',      -- size and modification time of config.yaml as it was last read
    origin TEXT NOT NULL DEFAULT '',            -- model or run that the run started from, in config.yaml
    best_step INTEGER,                          -- step in best_checkpoint.json
    metrics_offset INTEGER NOT NULL DEFAULT 0,  -- bytes of metrics.jsonl that are in training_logs
    metrics_head TEXT NOT NULL DEFAULT '',      -- digest of the file's beginning; another one is another file
    generation INTEGER NOT NULL DEFAULT 0,      -- how often another file took its place
    events_offset INTEGER NOT NULL DEFAULT 0,
    events_head TEXT NOT NULL DEFAULT '',
    unreadable INTEGER NOT NULL DEFAULT 0,      -- lines of metrics.jsonl that are not rows
    curves TEXT NOT NULL DEFAULT ''             -- state of RunCurves, see the table curves
);
CREATE TABLE attempts (
    run INTEGER NOT NULL, attempt INTEGER NOT NULL,
    start TEXT, end TEXT, first_step INTEGER, last_step INTEGER, world_size INTEGER, exit_reason TEXT, host TEXT,
    rewound_to INTEGER,                    -- it discarded later steps of the attempts before it
    PRIMARY KEY (run, attempt)
) WITHOUT ROWID;
CREATE TABLE training_logs (
    id INTEGER PRIMARY KEY,
    run INTEGER NOT NULL, attempt INTEGER NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL,
    metrics TEXT NOT NULL                  -- the line of metrics.jsonl
);
CREATE INDEX training_logs_by_run ON training_logs (run);
CREATE TABLE curves (                      -- an envelope per metric, of all rows up to last_id in runs.curves
    run INTEGER NOT NULL, metric TEXT NOT NULL, size INTEGER NOT NULL, segments BLOB NOT NULL, pending BLOB NOT NULL,
    PRIMARY KEY (run, metric)
);
CREATE TABLE points (                      -- all points of the saved curves, for zooming
    run INTEGER NOT NULL, metric TEXT NOT NULL, chunk INTEGER NOT NULL, first REAL NOT NULL, last REAL NOT NULL,
    points BLOB NOT NULL,                  -- (points, 2) as float64, with x from first to last
    PRIMARY KEY (run, metric, chunk)
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused: an open log asks for ids above the last that it showed
    run INTEGER NOT NULL, time REAL NOT NULL, attempt INTEGER, step INTEGER,
    kind TEXT NOT NULL, text TEXT NOT NULL,
    rule TEXT                              -- of a health rule's finding, whose kind is its level
);
CREATE INDEX events_by_run ON events (run);
CREATE INDEX events_by_rule ON events (run, rule) WHERE rule IS NOT NULL;
CREATE TABLE evaluations (
    run INTEGER NOT NULL, step INTEGER NOT NULL, dataset TEXT NOT NULL,
    stamp TEXT NOT NULL,                   -- size and modification time of the metrics.json
    metrics TEXT NOT NULL,
    PRIMARY KEY (run, step, dataset)
);
"""
TABLES_OF_A_RUN = ("training_logs", "curves", "points", "events", "evaluations", "attempts")
"""Tables with a column `run`."""
REPLAY_ROWS = 20_000
"""Number of rows to read at a time when catching up with a run."""
CHUNK_BYTES = 16 * 4096
"""Size of a full chunk of points."""


class LogEvent(NamedTuple):
    """A line of a run's log; `kind` is start, end, failure, step, evaluation, checkpoint or the level of a finding."""

    time: float
    attempt: int | None
    step: int | None
    kind: str
    text: str
    rule: str | None = None


@dataclass(frozen=True)
class FilePositions:
    """The path of a run, and the positions up to which its files were read; see the table `runs`."""

    path: str
    metrics_offset: int
    metrics_head: str
    events_offset: int
    events_head: str
    generation: int


@dataclass(frozen=True)
class RunInfo:
    """A run, for the table of runs and the head of its page.

    Attributes:
        id: id in the database.
        path: path relative to the root.
        generation: number of times that another metrics.jsonl replaced the file.
        unreadable: number of lines of metrics.jsonl that are not rows.
        record: last read content of `run.json`.
        saved_curves: last saved state of `RunCurves`.
        first_start: ISO time of the first attempt; None if there is none.
        end: ISO time of the end of the last attempt; `host` and `exit_reason` are also of the last attempt.
        origin: model or run directory that the run started from, as in its configuration; empty if unknown.
        findings: current finding of each health rule that has reported something, except at discarded steps.
        accuracies: `accepted_at_1` and step of the best evaluated checkpoint, by dataset: the one that
            `best_checkpoint.json` names; without this file, the one with the highest `accepted_at_1`.
    """

    id: int
    path: str
    stage: str | None
    recipe: str | None
    status: str
    total_steps: int | None
    generation: int
    unreadable: int
    record: str
    origin: str
    saved_curves: str
    first_start: str | None
    end: str | None
    host: str | None
    exit_reason: str | None
    findings: tuple[LogEvent, ...]
    accuracies: Mapping[str, tuple[float, int]]

    @cached_property
    def saved_state(self) -> RunCurves:
        """The last saved curves, without envelopes."""
        return RunCurves.load(self.saved_curves, ()) if self.saved_curves else RunCurves()


RUN_QUERY = """
SELECT runs.id, path, stage, recipe, status, total_steps, generation, unreadable, record, origin,
    curves AS saved_curves, (SELECT min(start) FROM attempts WHERE run = runs.id) AS first_start,
    last.end, last.host, last.exit_reason
FROM runs
LEFT JOIN attempts AS last ON run = runs.id AND attempt = (SELECT max(attempt) FROM attempts WHERE run = runs.id)
ORDER BY status = 'running' DESC, last.start DESC, path
"""


class MonitorDatabase:
    """One connection. The follower writes; each other thread reads with its own connection.

    Args:
        path: path of the file, which is created if it is missing, and emptied if it is from another version.

    Raises:
        UserError: the file cannot be opened, or is not a database.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=60, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=OFF")  # rows lost in a crash are read again from the runs
            self._create_tables(path)
        except (OSError, sqlite3.Error) as error:
            # another kind of file may be valuable
            advice = "delete it, or set another one with --database" if _is_sqlite(path) else "set another --database"
            raise UserError(f"the database {path} cannot be used ({error}); {advice}") from error
        self._connection.row_factory = sqlite3.Row

    def _create_tables(self, path: Path) -> None:
        """Replace the tables of another version."""
        [version] = self._connection.execute("PRAGMA user_version").fetchone()
        if version == VERSION:
            return
        # `sqlite_...` are SQLite's own tables
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        tables = {name for (name,) in self._connection.execute(query)}
        if tables and not tables >= OWN_TABLES:
            raise UserError(f"{path} is the database of another program; set another --database")
        for name in tables:
            self._connection.execute(f'DROP TABLE "{name}"')
        self._connection.executescript(f"{SCHEMA} PRAGMA user_version={VERSION};")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all writes of the block or none; no other process writes meanwhile."""
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield

    def version(self) -> int:
        """Return a number that changes when another process writes to the file."""
        return self._connection.execute("PRAGMA data_version").fetchone()[0]

    # Runs

    def runs(self) -> dict[str, RunInfo]:
        """Return all runs by path, running ones first, then the newest."""
        findings: dict[int, list[LogEvent]] = {}
        first = "SELECT min(rewound_to) FROM attempts WHERE run = events.run AND attempt > events.attempt"
        is_effective = f"ifnull(step <= ({first}), TRUE)"  # as in `effective_rows`
        latest = f"SELECT max(id) FROM events WHERE rule IS NOT NULL AND {is_effective} GROUP BY run, rule"
        for row in self._connection.execute(f"SELECT * FROM events WHERE id IN ({latest})"):
            findings.setdefault(row["run"], []).append(_event(row)[1])
        accuracies: dict[int, dict[str, tuple[float, int]]] = {}
        rates = (  # the last one of a run counts: among equal rates, the newest checkpoint, as in the evaluation
            "SELECT run, json_extract(metrics, '$.accepted_at_1') AS rate, dataset, step FROM evaluations "
            "JOIN runs ON runs.id = run WHERE typeof(rate) IN ('integer', 'real') "
            "AND step = coalesce(best_step, step) ORDER BY rate, step"
        )
        for run, rate, dataset, step in self._connection.execute(rates):
            accuracies.setdefault(run, {})[dataset] = rate, step
        found = self._connection.execute(RUN_QUERY).fetchall()
        return {
            row["path"]: RunInfo(
                **row, findings=tuple(findings.get(row["id"], ())), accuracies=accuracies.get(row["id"], {})
            )
            for row in found
        }

    def live_runs(self) -> list[int]:
        """Return the runs whose last read record has the status running."""
        return [run for (run,) in self._connection.execute("SELECT id FROM runs WHERE status = 'running'")]

    def run_paths(self) -> dict[int, str]:
        """Return the paths of all runs by id."""
        return {run: path for run, path in self._connection.execute("SELECT id, path FROM runs")}

    def find_run(self, path: str) -> tuple[int, str] | None:
        """Return the id of the run at a path and its last read `run.json`; None if there is no such run."""
        row = self._connection.execute("SELECT id, record FROM runs WHERE path = ?", (path,)).fetchone()
        return None if row is None else (row["id"], row["record"])

    def save_run(self, path: str, text: str, record: Mapping[str, Any]) -> int:
        """Insert or update a run, without attempts, from its `run.json`; returns its id."""
        names = ("project", "experiment", "stage", "recipe", "status", "total_steps")
        self._connection.execute(
            f"INSERT INTO runs (path, record, {', '.join(names)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (path) DO UPDATE SET record = excluded.record, "
            + ", ".join(f"{name} = excluded.{name}" for name in names),
            [path, text, *(record.get(name) for name in names)],
        )
        return self._connection.execute("SELECT id FROM runs WHERE path = ?", (path,)).fetchone()[0]

    def config_stamp(self, run: int) -> str:
        """Return the stamp of the last read `config.yaml` of a run; empty if there is none."""
        return self._connection.execute("SELECT config_stamp FROM runs WHERE id = ?", (run,)).fetchone()[0]

    def save_origin(self, run: int, stamp: str, origin: str) -> None:
        """Save from which model or run a run started, according to the `config.yaml` with this stamp."""
        self._connection.execute("UPDATE runs SET config_stamp = ?, origin = ? WHERE id = ?", (stamp, origin, run))

    def save_best_step(self, run: int, step: int | None) -> bool:
        """Save the step in `best_checkpoint.json`; returns whether it is another one."""
        query = "UPDATE runs SET best_step = ? WHERE id = ? AND best_step IS NOT ?"
        return self._connection.execute(query, (step, run, step)).rowcount > 0

    def save_attempts(self, run: int, attempts: Sequence[Mapping[str, Any]]) -> None:
        """Replace a run's attempts with those of its `run.json`."""
        names = ("attempt", "start", "end", "first_step", "last_step", "world_size", "exit_reason", "host")
        self._connection.execute("DELETE FROM attempts WHERE run = ?", (run,))
        rewound_to = rewinds(attempts)
        self._connection.executemany(
            "INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            ([run, *(each.get(name) for name in names), rewound_to.get(each["attempt"])] for each in attempts),
        )

    def first_steps(self, run: int) -> dict[int, int]:
        """Return the step from which each attempt resumed, if known."""
        query = "SELECT attempt, first_step FROM attempts WHERE run = ? AND first_step IS NOT NULL"
        return {attempt: step for attempt, step in self._connection.execute(query, (run,))}

    def delete_run(self, run: int) -> None:
        """Delete a run and all of its data."""
        self._delete_contents(run)
        self._connection.execute("DELETE FROM runs WHERE id = ?", (run,))

    def forget_rows(self, run: int) -> None:
        """Reset a run, because another file replaced its metrics.jsonl."""
        self._delete_contents(run)
        reset = (
            "UPDATE runs SET generation = generation + 1, record = '', metrics_offset = 0, metrics_head = '', "
            "events_offset = 0, events_head = '', unreadable = 0, curves = '' WHERE id = ?"
        )
        self._connection.execute(reset, (run,))

    def _delete_contents(self, run: int) -> None:
        for table in TABLES_OF_A_RUN:
            self._connection.execute(f"DELETE FROM {table} WHERE run = ?", (run,))

    # Rows and curves

    def positions(self, run: int) -> FilePositions | None:
        """Return the positions up to which the files of a run were read; None if there is no such run."""
        query = (
            "SELECT path, metrics_offset, metrics_head, events_offset, events_head, generation FROM runs WHERE id = ?"
        )
        row = self._connection.execute(query, (run,)).fetchone()
        return None if row is None else FilePositions(**row)

    def advance_metrics(self, run: int, offset: int, head: str, unreadable: int) -> None:
        """Update the position in `metrics.jsonl`, and count its new lines that are not rows."""
        query = "UPDATE runs SET metrics_offset = ?, metrics_head = ?, unreadable = unreadable + ? WHERE id = ?"
        self._connection.execute(query, (offset, head, unreadable, run))

    def advance_events(self, run: int, offset: int, head: str) -> None:
        """Update the position in `events.jsonl`."""
        self._connection.execute("UPDATE runs SET events_offset = ?, events_head = ? WHERE id = ?", (offset, head, run))

    def add_rows(self, run: int, rows: Sequence[MetricsRow], lines: Sequence[bytes]) -> int:
        """Append rows with their lines in `metrics.jsonl`; returns the id of the last."""
        [newest] = self._connection.execute("SELECT coalesce(max(id), 0) FROM training_logs").fetchone()
        self._connection.executemany(
            "INSERT INTO training_logs VALUES (?, ?, ?, ?, ?, ?)",
            (
                (number, run, row.attempt, row.step, row.time, line.decode())
                for number, (row, line) in enumerate(zip(rows, lines), start=newest + 1)
            ),
        )
        return newest + len(rows)

    def rows(self, run: int) -> Iterator[MetricsRow]:
        """Yield all rows of a run in order."""
        query = "SELECT attempt, step, time, metrics FROM training_logs WHERE run = ? ORDER BY id"
        return map(_row, self._connection.execute(query, (run,)))

    def last_time(self, run: int) -> float:
        """Return the time of the last row of a run, in seconds since 1970; 0 before the first."""
        query = "SELECT time FROM training_logs WHERE run = ? ORDER BY id DESC LIMIT 1"
        row = self._connection.execute(query, (run,)).fetchone()
        return 0.0 if row is None else row[0]

    def load_curves(self, run: int) -> RunCurves:
        """Return the curves of a run with all its rows."""
        [state] = self._connection.execute("SELECT curves FROM runs WHERE id = ?", (run,)).fetchone() or ("",)
        query = "SELECT metric, size, segments, pending FROM curves WHERE run = ?"
        curves = RunCurves.load(state, self._connection.execute(query, (run,))) if state else RunCurves()
        self.catch_up(run, curves)
        return curves

    def has_unsaved_rows(self, run: int) -> bool:
        """Whether a run has rows that are not in its saved curves."""
        query = "SELECT EXISTS (SELECT 1 FROM training_logs WHERE run = ? AND id > ?)"
        return bool(self._connection.execute(query, (run, self.saved_id(run))).fetchone()[0])

    def catch_up(self, run: int, curves: RunCurves) -> None:
        """Add missing rows to a run's curves; another process may have read them from the files."""
        query = (
            "SELECT id, attempt, step, time, metrics FROM training_logs WHERE run = ? AND id > ? ORDER BY id LIMIT ?"
        )
        while found := self._connection.execute(query, (run, curves.last_id, REPLAY_ROWS)).fetchall():
            rows = [_row(each[1:]) for each in found]
            curves.add(rows, self.first_steps(run), found[-1]["id"])

    def save_curves(self, run: int, curves: RunCurves) -> None:
        """Save the curves of a run and their new points, so that its rows need not be read again."""
        saved_id = self.saved_id(run)
        if saved_id != curves.saved_id:  # another process has saved its curves, or a transaction failed
            newer = RunCurves()
            newer.offsets, newer.last_id = dict(curves.offsets), saved_id
            self.catch_up(run, newer)
            curves.unsaved = newer.unsaved
        for metric, points in curves.unsaved.items():
            self._add_points(run, metric, points)
        state, blobs = curves.dump()
        self._connection.executemany(
            "INSERT OR REPLACE INTO curves VALUES (?, ?, ?, ?, ?)", ((run, *blob) for blob in blobs)
        )
        self._connection.execute("UPDATE runs SET curves = ? WHERE id = ?", (state.decode(), run))

    def saved_id(self, run: int) -> int:
        """Return the id of the newest row in the saved curves of a run; 0 if there are none."""
        query = "SELECT iif(curves = '', 0, json_extract(curves, '$.last_id')) FROM runs WHERE id = ?"
        row = self._connection.execute(query, (run,)).fetchone()
        return 0 if row is None else row[0]

    def _add_points(self, run: int, metric: str, points: Array) -> None:
        """Append points to the last chunk of a metric until it is full, then to new ones."""
        query = "SELECT chunk, points FROM points WHERE run = ? AND metric = ? ORDER BY chunk DESC LIMIT 1"
        row = self._connection.execute(query, (run, metric)).fetchone()
        chunk, old = (0, b"") if row is None else row
        if len(old) >= CHUNK_BYTES:
            chunk, old = chunk + 1, b""
        data = old + points.tobytes()
        for start in range(0, len(data), CHUNK_BYTES):
            part = data[start : start + CHUNK_BYTES]
            x = np.frombuffer(part).reshape(-1, 2)[:, 0]
            values = (run, metric, chunk, float(x.min()), float(x.max()), part)
            self._connection.execute("INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?, ?, ?)", values)
            chunk += 1

    def points(self, run: int, metric: str, low: float, high: float) -> Array:
        """Return the saved points (points, 2) of a metric in all chunks that overlap the range from `low` to `high`."""
        query = "SELECT points FROM points WHERE run = ? AND metric = ? AND last >= ? AND first <= ? ORDER BY chunk"
        chunks = self._connection.execute(query, (run, metric, low, high))
        return np.frombuffer(b"".join(blob for (blob,) in chunks)).reshape(-1, 2)

    # Events

    def add_events(self, run: int, events: Iterable[LogEvent]) -> None:
        """Append lines to a run's log."""
        self._connection.executemany(
            "INSERT INTO events (run, time, attempt, step, kind, text, rule) VALUES (?, ?, ?, ?, ?, ?, ?)",
            ((run, *event) for event in events),
        )

    def attempt_events(self, run: int) -> set[tuple[int, str]]:
        """Return attempt and kind of the log lines about starts and ends of attempts."""
        query = "SELECT attempt, kind FROM events WHERE run = ? AND kind IN ('start', 'end', 'failure')"
        return {(attempt, kind) for attempt, kind in self._connection.execute(query, (run,))}

    def delete_findings(self, run: int) -> None:
        """Delete the findings of the health rules for a run."""
        self._connection.execute("DELETE FROM events WHERE run = ? AND rule IS NOT NULL", (run,))

    def last_events(self, run: int, after: int, limit: int) -> list[tuple[int, LogEvent]]:
        """Return the last lines of a run's log with ids above `after`, oldest first."""
        query = "SELECT * FROM events WHERE run = ? AND id > ? ORDER BY id DESC LIMIT ?"
        found = [_event(row) for row in self._connection.execute(query, (run, after, limit))]
        return sorted(found, key=lambda item: (item[1].time, item[0]))

    def search_events(self, run: int, text: str, limit: int) -> list[tuple[int, LogEvent]]:
        """Return the lines of a run's log that contain a text, newest first."""
        pattern = "%" + text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        query = "SELECT * FROM events WHERE run = ? AND text LIKE ? ESCAPE '\\' ORDER BY time DESC LIMIT ?"
        return [_event(row) for row in self._connection.execute(query, (run, pattern, limit))]

    # Evaluations

    def evaluation_stamps(self, run: int) -> dict[int, str]:
        """Return the stamp of the metrics.json of every evaluated checkpoint, by step."""
        query = "SELECT DISTINCT step, stamp FROM evaluations WHERE run = ?"
        return {step: stamp for step, stamp in self._connection.execute(query, (run,))}

    def replace_evaluation(self, run: int, step: int, stamp: str, metrics: Mapping[str, Any]) -> None:
        """Replace the metrics of an evaluated checkpoint, by dataset; without metrics, remove it."""
        self._connection.execute("DELETE FROM evaluations WHERE run = ? AND step = ?", (run, step))
        self._connection.executemany(
            "INSERT INTO evaluations VALUES (?, ?, ?, ?, ?)",
            ((run, step, name, stamp, orjson.dumps(values).decode()) for name, values in metrics.items()),
        )

    def evaluations(self, run: int) -> dict[str, dict[int, dict[str, Any]]]:
        """Return the metrics of the evaluated checkpoints by dataset and step."""
        query = "SELECT dataset, step, metrics FROM evaluations WHERE run = ? ORDER BY dataset, step"
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for dataset, step, metrics in self._connection.execute(query, (run,)):
            found.setdefault(dataset, {})[step] = orjson.loads(metrics)
        return found


def _row(values: Sequence[Any]) -> MetricsRow:
    attempt, step, time, line = values
    metrics = parse_object(line.encode()) or {}
    for key in KEY_COLUMNS:
        del metrics[key]
    return MetricsRow(step, attempt, time, metrics)


def _is_sqlite(path: Path) -> bool:
    """Whether a file begins like an SQLite database."""
    try:
        with open(path, "rb") as file:
            return file.read(len(SQLITE_HEADER)) == SQLITE_HEADER
    except OSError:
        return False


def _event(row: sqlite3.Row) -> tuple[int, LogEvent]:
    return row["id"], LogEvent(row["time"], row["attempt"], row["step"], row["kind"], row["text"], row["rule"])


def database_for(root: Path) -> Path:
    """Return the default path of a root's database, in the user's cache.

    Each host has its own, because hosts that share a home directory over a network must not share a file in WAL mode.
    """
    name = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:12]
    return user_cache_dir() / f"monitor-{socket.gethostname()}-{name}.sqlite"
