"""The persistent job queue of a run: a job is one checkpoint on one dataset, and a row of `ledger.sqlite`.

Claims are atomic, failed jobs are retried with back-off, and a killed process loses nothing. Several processes can
share a queue, even on a network file system. Write-ahead logs do not work there, so the file has a rollback journal.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, NamedTuple

from verl_ext.console import warn
from verl_ext.errors import UserError, first_line_of
from verl_ext.processes import boot_id, pid_namespace, start_ticks

LEDGER_FILE = "ledger.sqlite"
REMOVED = "the checkpoint was removed before it was evaluated"
"""Error of jobs whose checkpoint is gone."""
EXPIRY_S = 120.0
"""A process on another machine counts as dead after this long without a heartbeat."""
HEARTBEAT_S = 15.0
BUSY_TIMEOUT_S = 60.0
"""How long a statement waits for another process's transaction."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    checkpoint TEXT NOT NULL, dataset TEXT NOT NULL, tier INTEGER NOT NULL, digest TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'pending', attempts INTEGER NOT NULL DEFAULT 0, not_before REAL NOT NULL DEFAULT 0,
    worker TEXT, host TEXT, pid INTEGER, born INTEGER, renewed REAL,
    seconds TEXT NOT NULL DEFAULT '{}', started REAL, ended REAL, error TEXT, owner TEXT NOT NULL,
    PRIMARY KEY (checkpoint, dataset)
);
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, heard REAL NOT NULL);
CREATE TABLE IF NOT EXISTS blocked (owner TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS published (checkpoint TEXT PRIMARY KEY, digest TEXT NOT NULL, tracked TEXT);
"""
_UNCLAIMED = "worker=NULL, host=NULL, pid=NULL, born=NULL, renewed=NULL"

JobKey = tuple[str, str]
"""Checkpoint and dataset."""


class ProcessId(NamedTuple):
    """A process, distinguished by its start time from a later one with the same id."""

    host: str
    pid: int
    start_ticks: int
    """Clock ticks from the machine's boot to the start of the process."""

    @staticmethod
    def current() -> ProcessId:
        """The calling process."""
        return ProcessId(_host(), os.getpid(), start_ticks(os.getpid()) or 0)

    @property
    def key(self) -> str:
        """The text that the queue stores."""
        return f"{self.host} {self.pid} {self.start_ticks}"

    @staticmethod
    def from_key(key: str) -> ProcessId:
        """Inverse of `key`."""
        host, pid, ticks = key.rsplit(" ", 2)
        return ProcessId(host, int(pid), int(ticks))

    def has_died(self, last_heartbeat: float) -> bool:
        """Whether the process is dead: known immediately on this machine, assumed after `EXPIRY_S` on another.

        Args:
            last_heartbeat: time of the last heartbeat, in seconds since 1970.
        """
        if self.host == _host():
            return start_ticks(self.pid) != self.start_ticks
        return time.time() > last_heartbeat + EXPIRY_S

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.partition('/')[0]}"


def _host() -> str:
    """The machine and the process namespace, because machines may share names, and containers process ids."""
    return f"{socket.gethostname()}/{boot_id()}/{pid_namespace()}"


@dataclass(frozen=True)
class Job:
    """One checkpoint on one dataset."""

    checkpoint: str
    """Label of the model, such as `step_200`."""
    dataset: str
    """Name of the dataset in the recipe."""
    tier: int
    """1, 2 or 3."""
    digest: str
    """Digest of everything that affects the results; a job with another digest is out of date."""
    state: Literal["pending", "running", "done", "failed"]
    """Also `pending` if the process that ran the job has died."""
    attempts: int
    """Number of failed attempts."""
    not_before: float
    """The next attempt does not start before this time, in seconds since 1970."""
    worker: str | None
    """The process that runs the job, in readable form."""
    seconds: dict[str, float]
    """Wall-clock seconds by phase."""
    started: float | None
    """Time of the first claim, in seconds since 1970."""
    ended: float | None
    """Time when the job ended, in seconds since 1970."""
    error: str | None
    """Why the last attempt failed."""

    @property
    def key(self) -> JobKey:
        """Identifies the job in its queue."""
        return self.checkpoint, self.dataset

    @property
    def has_ended(self) -> bool:
        """Whether the job is done, or has failed for good."""
        return self.state in ("done", "failed")

    def __str__(self) -> str:
        return f"{self.checkpoint} on {self.dataset}"

    @staticmethod
    def from_row(row: sqlite3.Row) -> Job:
        """Read a row, whose columns have the names of the fields."""
        job = Job(**{each.name: row[each.name] for each in fields(Job)} | {"seconds": json.loads(row["seconds"])})
        is_abandoned = job.state == "running" and _claimant_has_died(row)
        return replace(job, state="pending", worker=None) if is_abandoned else job


def _claimant_of(row: sqlite3.Row) -> ProcessId:
    return ProcessId(row["host"], row["pid"], row["born"])


def _claimant_has_died(row: sqlite3.Row) -> bool:
    return _claimant_of(row).has_died(row["renewed"])


class JobQueue:
    """The jobs of one run, or of one model without a run.

    Every job has a requester (the column `owner`): the process that added it with its current digest.

    Args:
        directory: holds `ledger.sqlite`; created if missing.
        max_attempts: a job that failed this often stays `failed`.
        backoff_s: seconds before the second attempt, doubled for each further one.

    Raises:
        UserError: the file cannot be created, read or written, is not a SQLite database, or lacks a column of the
            schema. Every method raises it, too.
    """

    def __init__(self, directory: Path, max_attempts: int = 3, backoff_s: float = 30.0) -> None:
        self.max_attempts, self.backoff_s = max_attempts, backoff_s
        self.path = directory / LEDGER_FILE
        self._process = ProcessId.current()
        with self._errors():
            directory.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            self._connection.row_factory = sqlite3.Row
            self._connection.executescript(_SCHEMA)
            missing = _missing_columns(self._connection)
        if missing:
            self._connection.close()
            raise UserError(
                f"another version wrote the ledger {self.path}, which lacks {missing[0]}; delete the file (answers "
                "and verdicts are stored elsewhere and are reused)"
            )

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Renew the claims of this process in a thread, even while the main thread is busy.

        For example, hashing a large export takes longer than a claim lasts.
        """
        stop = threading.Event()
        thread = threading.Thread(target=_send_heartbeats, args=(self.path.parent, stop), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def send_heartbeat(self) -> None:
        """Tell other machines that this process is alive, which keeps its claims and requested jobs valid."""
        with self._transaction() as database:
            database.execute("UPDATE owners SET heard=? WHERE owner=?", (time.time(), self._process.key))
            database.execute(
                "UPDATE jobs SET renewed=? WHERE state='running' AND host=? AND pid=? AND born=?",
                (time.time(), *self._process),
            )

    def jobs(self) -> list[Job]:
        """All jobs, in the order in which they were added."""
        return [Job.from_row(row) for row in self._rows("SELECT * FROM jobs ORDER BY rowid")]

    # Adding jobs

    def add_all(self, jobs: Iterable[tuple[str, str, int, str]]) -> None:
        """Add jobs in one transaction, given as checkpoint, dataset, tier and digest.

        An existing job with the same digest keeps its state and the lower of the two tiers. With another digest, it is
        reset unless the process that requested it is still alive: otherwise, two processes with different settings
        would reset each other's jobs forever. If two processes wait for each other, the first one takes precedence.
        """
        with self._transaction() as database:
            for checkpoint, dataset, tier, digest in jobs:
                self._add(database, (checkpoint, dataset), tier, digest)

    def _add(self, database: sqlite3.Connection, key: JobKey, tier: int, digest: str) -> None:
        row = self._row(key)
        if row is None:
            self._register(database)
            database.execute(
                "INSERT INTO jobs (checkpoint, dataset, tier, digest, owner) VALUES (?, ?, ?, ?, ?)",
                (*key, tier, digest, self._process.key),
            )
        elif row["digest"] != digest:
            if self._belongs_to_another(row):
                database.execute("INSERT OR IGNORE INTO blocked VALUES (?)", (self._process.key,))
            else:
                self._reset(database, key, tier, digest)
        elif row["error"] == REMOVED:  # the checkpoint is back
            self._reset(database, key, min(tier, row["tier"]), digest)
        elif tier < row["tier"]:
            database.execute("UPDATE jobs SET tier=? WHERE checkpoint=? AND dataset=?", (tier, *key))
        elif row["owner"] != self._process.key and self._is_mine_or_dead(row["owner"]):
            self._register(database)
            database.execute("UPDATE jobs SET owner=? WHERE checkpoint=? AND dataset=?", (self._process.key, *key))

    def _reset(self, database: sqlite3.Connection, key: JobKey, tier: int, digest: str) -> None:
        self._register(database)
        database.execute(
            "UPDATE jobs SET tier=?, digest=?, owner=?, state='pending', attempts=0, not_before=0, seconds='{}', "
            f"started=NULL, ended=NULL, error=NULL, {_UNCLAIMED} WHERE checkpoint=? AND dataset=?",
            (tier, digest, self._process.key, *key),
        )

    def _register(self, database: sqlite3.Connection) -> None:
        database.execute("INSERT OR IGNORE INTO owners VALUES (?, ?)", (self._process.key, time.time()))

    def is_wanted_by_others(self, checkpoint: str) -> bool:
        """Whether another live process requested a job of this checkpoint that has not ended."""
        rows = self._rows("SELECT owner FROM jobs WHERE checkpoint=? AND state IN ('pending', 'running')", checkpoint)
        return any(not self._is_mine_or_dead(row["owner"]) for row in rows)

    # One attempt

    def claim(self, wanted: Iterable[tuple[str, str, str]]) -> Job | None:
        """Claim the first of these jobs that is pending, or whose process has died.

        Claims nothing while a process that takes precedence has one of them pending or running with other settings.

        Args:
            wanted: checkpoint, dataset and digest, the most urgent first.
        """
        with self._transaction() as database:
            rows = [(key, digest, row) for *key, digest in wanted if (row := self._row(key)) is not None]
            if any(row["digest"] != digest and self._belongs_to_another(row) for _, digest, row in rows):
                return None
            for key, digest, row in rows:
                if row["digest"] == digest and _is_due(row):
                    database.execute(
                        "UPDATE jobs SET state='running', worker=?, host=?, pid=?, born=?, renewed=?, "
                        "started=coalesce(started, ?), ended=NULL WHERE checkpoint=? AND dataset=?",
                        (str(self._process), *self._process, time.time(), time.time(), *key),
                    )
                    claimed = self._row(key)
                    assert claimed is not None
                    return Job.from_row(claimed)
        return None

    def record_seconds(self, job: Job, seconds: Mapping[str, float]) -> bool:
        """Store the time spent; returns False if another process has taken over the job."""
        return self._update(job, "renewed=?, seconds=?", time.time(), json.dumps(seconds))

    def finish(self, job: Job, seconds: Mapping[str, float]) -> bool:
        """Mark a job as done; returns the same as `record_seconds`."""
        return self._update(
            job, f"state='done', error=NULL, ended=?, seconds=?, {_UNCLAIMED}", time.time(), json.dumps(seconds)
        )

    def release(self, job: Job, seconds: Mapping[str, float]) -> bool:
        """Put an unfinished job back without counting an attempt; returns the same as `record_seconds`."""
        return self._update(job, f"state='pending', seconds=?, {_UNCLAIMED}", json.dumps(seconds))

    def fail(self, job: Job, error: str, seconds: Mapping[str, float], is_final: bool = False) -> bool:
        """Store a failed attempt; the job is retried after the back-off, or fails. Returns like `record_seconds`.

        Args:
            is_final: whether the job fails even if attempts are left.
        """
        attempts = job.attempts + 1
        state = "failed" if is_final or attempts >= self.max_attempts else "pending"
        return self._update(
            job, f"state=?, attempts=?, not_before=?, error=?, ended=?, seconds=?, {_UNCLAIMED}",
            state, attempts, time.time() + self.pause_s(attempts), error, time.time(), json.dumps(seconds),
        )  # fmt: skip

    def pause_s(self, attempts: int) -> float:
        """Seconds between the given failed attempt and the next one."""
        return self.backoff_s * 2 ** (attempts - 1)

    def _update(self, job: Job, assignments: str, *values: object) -> bool:
        """Change a job if this process holds its claim."""
        with self._transaction() as database:
            cursor = database.execute(
                f"UPDATE jobs SET {assignments} WHERE checkpoint=? AND dataset=? AND digest=? AND state='running' "
                "AND host=? AND pid=? AND born=?",
                (*values, *job.key, job.digest, *self._process),
            )
        return cursor.rowcount == 1

    # Jobs of removed checkpoints, and retries by the user

    def fail_removed(self, labels: Collection[str]) -> list[JobKey]:
        """Fail the pending jobs of removed checkpoints, given by label; returns them."""
        with self._transaction() as database:
            removed = [job.key for job in self.jobs() if job.state == "pending" and job.checkpoint in labels]
            for key in removed:
                database.execute(
                    f"UPDATE jobs SET state='failed', ended=?, error=?, {_UNCLAIMED} WHERE checkpoint=? AND dataset=?",
                    (time.time(), REMOVED, *key),
                )
        return removed

    def retry(self, only: Collection[JobKey] | None = None, incomplete: Collection[JobKey] = ()) -> list[Job]:
        """Re-queue jobs that failed, or that wait for their next attempt; returns them as they were.

        Args:
            only: restricts this to some jobs; None means all.
            incomplete: jobs that are done and run again. Their results are published again.
        """
        with self._transaction() as database:
            due = [
                job
                for job in self.jobs()
                if (only is None or job.key in only)
                and (
                    job.state == "failed"
                    or (job.state == "pending" and job.attempts)
                    or (job.state == "done" and job.key in incomplete)
                )
            ]
            for job in due:
                database.execute(
                    f"UPDATE jobs SET state='pending', attempts=0, not_before=0, {_UNCLAIMED} "
                    "WHERE checkpoint=? AND dataset=?",
                    job.key,
                )
                if job.state == "done":
                    database.execute("DELETE FROM published WHERE checkpoint=?", (job.checkpoint,))
        return due

    # Published results: a killed process's results are published later, and none are published twice. A digest
    # identifies the jobs that the results summarize.

    def published(self, checkpoint: str) -> tuple[str | None, str | None]:
        """Digests of the results that were last written ("" if they were removed) and last sent to W&B."""
        rows = self._rows("SELECT digest, tracked FROM published WHERE checkpoint=?", checkpoint)
        return (rows[0]["digest"], rows[0]["tracked"]) if rows else (None, None)

    def mark_published(self, checkpoint: str, digest: str) -> None:
        """Store that results were written, or with "" that they were removed."""
        with self._transaction() as database:
            database.execute(
                "INSERT INTO published VALUES (?, ?, NULL) ON CONFLICT DO UPDATE SET digest=excluded.digest",
                (checkpoint, digest),
            )

    def mark_tracked(self, checkpoint: str, digest: str) -> None:
        """Store that published results were sent to W&B."""
        with self._transaction() as database:
            database.execute("UPDATE published SET tracked=? WHERE checkpoint=?", (digest, checkpoint))

    # Processes that share the queue

    def _belongs_to_another(self, row: sqlite3.Row) -> bool:
        """Whether another process runs a job, or requested it and takes precedence."""
        is_running = row["state"] == "running" and _claimant_of(row) != self._process and not _claimant_has_died(row)
        return is_running or not (self._is_mine_or_dead(row["owner"]) or self._precedes(row["owner"]))

    def _is_mine_or_dead(self, requester: str) -> bool:
        if requester == self._process.key:
            return True
        rows = self._rows("SELECT heard FROM owners WHERE owner=?", requester)
        return not rows or ProcessId.from_key(requester).has_died(rows[0]["heard"])

    def _precedes(self, requester: str) -> bool:
        """Whether this process takes precedence over a requester that is waiting too, because it registered first.

        If two processes wait for each other to end, one of them must continue.
        """
        return bool(
            self._rows(
                "SELECT 1 FROM owners AS mine, owners AS its JOIN blocked ON blocked.owner = its.owner "
                "WHERE mine.owner=? AND its.owner=? AND mine.rowid < its.rowid",
                self._process.key,
                requester,
            )
        )

    # SQLite

    def _row(self, key: Iterable[str]) -> sqlite3.Row | None:
        rows = self._rows("SELECT * FROM jobs WHERE checkpoint=? AND dataset=?", *key)
        return rows[0] if rows else None

    def _rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        with self._errors():
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Take the lock at the start, so that what the block reads still holds when it writes."""
        with self._errors():
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # a stop signal may arrive before the transaction began or after it was committed
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"cannot use the ledger {self.path} ({first_line_of(error)}); free disk space or delete the file"
            ) from error


def _send_heartbeats(directory: Path, stop: threading.Event) -> None:
    has_warned = False
    while not stop.wait(HEARTBEAT_S):
        try:
            # opened each time, because a connection belongs to one thread and the file may be gone
            with closing(JobQueue(directory)) as queue:
                queue.send_heartbeat()
        except UserError as error:
            if not has_warned:
                warn(f"{error}; other machines may assume that this process is dead")
            has_warned = True


def _is_due(row: sqlite3.Row) -> bool:
    if row["state"] == "running":
        return _claimant_has_died(row)
    return row["state"] == "pending" and row["not_before"] <= time.time()


def _missing_columns(connection: sqlite3.Connection) -> list[str]:
    """Columns of the schema that a file lacks, as `table.column`."""
    empty = sqlite3.connect(":memory:")
    empty.executescript(_SCHEMA)
    query = "SELECT each.name || '.' || column.name FROM sqlite_master AS each, pragma_table_info(each.name) AS column"
    wanted, found = ([row[0] for row in each.execute(query)] for each in (empty, connection))
    empty.close()
    return [name for name in wanted if name not in found]
