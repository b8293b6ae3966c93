"""The SQLite database: tables, connections, and where it lies."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path

from verl_ext.errors import UserError
from verl_ext.files import user_cache_dir

VERSION = 2
SCHEMA = """
CREATE TABLE runs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused: open pages know a run by its id
    path TEXT NOT NULL UNIQUE,             -- relative to the root
    project TEXT, experiment TEXT, stage TEXT, recipe TEXT,
    status TEXT NOT NULL,
    total_steps INTEGER,
    record TEXT NOT NULL DEFAULT '',       -- run.json as it was last read
    metrics_offset INTEGER NOT NULL DEFAULT 0,  -- bytes of metrics.jsonl that are in training_logs
    generation INTEGER NOT NULL DEFAULT 0,      -- how often another file has taken its place
    metrics_head TEXT NOT NULL DEFAULT '',      -- digest of its beginning: another one is another file
    events_offset INTEGER NOT NULL DEFAULT 0,
    events_head TEXT NOT NULL DEFAULT '',
    last_packed INTEGER NOT NULL DEFAULT 0,     -- rows of training_logs up to here are in columns too
    unreadable INTEGER NOT NULL DEFAULT 0       -- lines that are no rows
);
CREATE TABLE attempts (
    run INTEGER NOT NULL, attempt INTEGER NOT NULL,
    start TEXT, end TEXT, first_step INTEGER, last_step INTEGER, world_size INTEGER, exit_reason TEXT, host TEXT,
    PRIMARY KEY (run, attempt)
) WITHOUT ROWID;
CREATE TABLE training_logs (               -- one row for each line of metrics.jsonl
    id INTEGER PRIMARY KEY,
    run INTEGER NOT NULL, attempt INTEGER NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL,
    metrics TEXT NOT NULL                  -- JSON
);
CREATE INDEX training_logs_by_step ON training_logs (run, attempt, step);
CREATE INDEX training_logs_by_run ON training_logs (run, id);
CREATE TABLE columns (                     -- the same numbers by metric, thousands of rows at a time
    run INTEGER NOT NULL, metric TEXT NOT NULL, last INTEGER NOT NULL,
    attempts BLOB NOT NULL, steps BLOB NOT NULL, vals BLOB NOT NULL,
    PRIMARY KEY (run, metric, last)
) WITHOUT ROWID;
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused: an open log asks for ids above the last that it showed
    run INTEGER NOT NULL, time REAL NOT NULL, attempt INTEGER, step INTEGER,
    kind TEXT NOT NULL, text TEXT NOT NULL
);
CREATE INDEX events_by_run ON events (run, id);
CREATE TABLE evaluations (
    run INTEGER NOT NULL, step INTEGER NOT NULL, dataset TEXT NOT NULL, figures TEXT NOT NULL,
    PRIMARY KEY (run, step, dataset)
) WITHOUT ROWID;
"""


def database_for(root: Path) -> Path:
    """Where the database of a root lies unless the user says otherwise: in the user's cache, not below the root."""
    name = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:12]
    return user_cache_dir() / f"monitor-{name}.sqlite"


def open_database(path: Path) -> sqlite3.Connection:
    """A connection; the tables are made where they are missing, and anew where they are of another version.

    Raises:
        UserError: the file cannot be opened, or is no database.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=60, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=OFF")  # whatever a crash takes is read again from the runs
        _ensure_tables(connection)
    except (OSError, sqlite3.Error) as error:
        raise UserError(
            f"the database {path} cannot be used ({error}); delete it, or name another with --database"
        ) from error
    connection.row_factory = sqlite3.Row
    return connection


def _ensure_tables(connection: sqlite3.Connection) -> None:
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if version == VERSION:
        return
    # `sqlite_...` are SQLite's own tables
    tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    for (name,) in connection.execute(tables).fetchall():
        connection.execute(f'DROP TABLE "{name}"')
    connection.executescript(f"{SCHEMA} PRAGMA user_version={VERSION};")
