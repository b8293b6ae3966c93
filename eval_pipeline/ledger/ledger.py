"""The work ledger: atomic claims, retries with back-off, and nothing lost when a process is killed."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from eval_pipeline.ledger import owners, published
from eval_pipeline.ledger.database import Database
from eval_pipeline.ledger.holder import Holder, has_died
from eval_pipeline.ledger.job import Job, job_of

LEDGER_FILE = "ledger.sqlite"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    checkpoint TEXT NOT NULL, dataset TEXT NOT NULL, tier INTEGER NOT NULL, digest TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'pending', attempts INTEGER NOT NULL DEFAULT 0, not_before REAL NOT NULL DEFAULT 0,
    worker TEXT, host TEXT, pid INTEGER, born INTEGER, renewed REAL,
    seconds TEXT NOT NULL DEFAULT '{}', started REAL, ended REAL, error TEXT, owner TEXT NOT NULL,
    PRIMARY KEY (checkpoint, dataset)
);
"""
REMOVED = "the checkpoint was removed before it was evaluated"
_FREE = "worker=NULL, host=NULL, pid=NULL, born=NULL, renewed=NULL"


class Ledger:
    """The ledger of one run, or of one model that no run saved.

    Args:
        directory: holds `ledger.sqlite`; made when missing.
        max_attempts: a job that failed so often stays `failed`.
        backoff_s: seconds before the second attempt, doubled for each further one.

    Raises:
        UserError: the file cannot be made or is no ledger.
    """

    def __init__(self, directory: Path, max_attempts: int = 3, backoff_s: float = 30.0) -> None:
        self.max_attempts, self.backoff_s = max_attempts, backoff_s
        self.me = Holder.this_process()
        self._database = Database(directory / LEDGER_FILE, _SCHEMA + owners.SCHEMA + published.SCHEMA)
        self._owners = owners.Owners(self._database, self.me)
        self.published = published.Published(self._database)
        """Whose figures are out."""

    @property
    def path(self) -> Path:
        """The file."""
        return self._database.path

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def add(self, checkpoint: str, dataset: str, tier: int, digest: str) -> None:
        """Enter a job.

        One that is there with the same digest stays as it is, at the lower of the two tiers. With another digest it is
        to be done anew, but not while the process lives that wants it as it is: two processes with different settings
        would undo each other's work without end. Where both wait for each other, the one that came first goes on.
        """
        key = checkpoint, dataset
        with self._database.transaction() as database:
            row = self._row(key)
            if row is None:
                self._owners.enter(database)
                database.execute(
                    "INSERT INTO jobs (checkpoint, dataset, tier, digest, owner) VALUES (?, ?, ?, ?, ?)",
                    (*key, tier, digest, self.me.key),
                )
            elif row["digest"] != digest:
                if self._is_anothers(row):
                    self._owners.block(database)
                else:
                    self._begin_anew(database, key, tier, digest)
            elif row["error"] == REMOVED:  # and yet it is there
                self._begin_anew(database, key, min(tier, row["tier"]), digest)
            elif tier < row["tier"]:
                database.execute("UPDATE jobs SET tier=? WHERE checkpoint=? AND dataset=?", (tier, *key))
            elif row["owner"] != self.me.key and self._owners.is_mine_or_gone(row["owner"]):
                self._owners.enter(database)
                database.execute("UPDATE jobs SET owner=? WHERE checkpoint=? AND dataset=?", (self.me.key, *key))

    def _begin_anew(self, database: sqlite3.Connection, key: tuple[str, str], tier: int, digest: str) -> None:
        self._owners.enter(database)
        database.execute(
            "UPDATE jobs SET tier=?, digest=?, owner=?, state='pending', attempts=0, not_before=0, seconds='{}', "
            f"started=NULL, ended=NULL, error=NULL, {_FREE} WHERE checkpoint=? AND dataset=?",
            (tier, digest, self.me.key, *key),
        )

    def others_want_more(self, checkpoint: str) -> bool:
        """Whether a living process still wants something done of a checkpoint that this one does not want."""
        rows = self._database.rows(
            "SELECT owner FROM jobs WHERE checkpoint=? AND state IN ('pending', 'running')", checkpoint
        )
        return any(not self._owners.is_mine_or_gone(row["owner"]) for row in rows)

    def beat(self) -> None:
        """Let other machines know that this process lives, and with it its claims and what it wants done."""
        with self._database.transaction() as database:
            self._owners.beat(database)
            database.execute(
                "UPDATE jobs SET renewed=? WHERE state='running' AND host=? AND pid=? AND born=?",
                (time.time(), self.me.host, self.me.pid, self.me.born),
            )

    def claim(self, wanted: Iterable[tuple[str, str, str]]) -> Job | None:
        """Take the first of these jobs that is free, or whose holder has died; none while another process that came
        first still has one of them to do with other settings.

        Args:
            wanted: checkpoint, data set and digest, the most urgent first.
        """
        with self._database.transaction() as database:
            rows = [(key, digest, self._row(key)) for *key, digest in wanted]
            if any(row is not None and row["digest"] != digest and self._is_anothers(row) for _, digest, row in rows):
                return None
            for key, digest, row in rows:
                if row is not None and row["digest"] == digest and _is_free(row):
                    database.execute(
                        "UPDATE jobs SET state='running', worker=?, host=?, pid=?, born=?, renewed=?, "
                        "started=coalesce(started, ?), ended=NULL WHERE checkpoint=? AND dataset=?",
                        (str(self.me), self.me.host, self.me.pid, self.me.born, time.time(), time.time(), *key),
                    )
                    claimed = self._row(key)
                    assert claimed is not None
                    return job_of(claimed)
        return None

    def renew(self, job: Job, seconds: dict[str, float]) -> bool:
        """Enter the time spent; returns False when the claim was lost and the work is somebody else's."""
        return self._update(job, "renewed=?, seconds=?", time.time(), json.dumps(seconds))

    def finish(self, job: Job, seconds: dict[str, float]) -> bool:
        """Enter a job as done; False when the claim was lost."""
        return self._update(
            job, f"state='done', error=NULL, ended=?, seconds=?, {_FREE}", time.time(), json.dumps(seconds)
        )

    def release(self, job: Job, seconds: dict[str, float]) -> bool:
        """Give a job back unfinished, as after a request to stop; no attempt is counted."""
        return self._update(job, f"state='pending', seconds=?, {_FREE}", json.dumps(seconds))

    def fail(self, job: Job, error: str, seconds: dict[str, float]) -> bool:
        """Enter a failed attempt: the job is tried again after the back-off, or is given up; False as in `finish`."""
        attempts = job.attempts + 1
        state = "failed" if attempts >= self.max_attempts else "pending"
        return self._update(
            job, f"state=?, attempts=?, not_before=?, error=?, ended=?, seconds=?, {_FREE}",
            state, attempts, time.time() + self.pause_s(attempts), error, time.time(), json.dumps(seconds),
        )  # fmt: skip

    def pause_s(self, attempts: int) -> float:
        """Seconds from the failure of a job that has then failed so often to its next attempt."""
        return self.backoff_s * 2 ** (attempts - 1)

    def give_up(self, labels: Collection[str]) -> list[tuple[str, str]]:
        """Enter the waiting jobs of checkpoints that have gone as failed.

        Args:
            labels: of these checkpoints.

        Returns:
            Checkpoint and data set of each.
        """
        with self._database.transaction() as database:
            gone = [
                (job.checkpoint, job.dataset)
                for job in self.jobs()
                if job.state == "pending" and job.checkpoint in labels
            ]
            for key in gone:
                database.execute(
                    f"UPDATE jobs SET state='failed', ended=?, error=?, {_FREE} WHERE checkpoint=? AND dataset=?",
                    (time.time(), REMOVED, *key),
                )
        return gone

    def retry(
        self, only: Collection[tuple[str, str]] | None = None, incomplete: Collection[tuple[str, str]] = ()
    ) -> list[Job]:
        """Make failed jobs, and those that wait for their next attempt, due at once; returns them.

        Args:
            only: checkpoint and data set of those that are meant; None means all.
            incomplete: checkpoint and data set of jobs that are done and due again. Their results are published anew.
        """
        with self._database.transaction() as database:
            jobs = [job for job in self.jobs() if only is None or (job.checkpoint, job.dataset) in only]
            due = [
                job
                for job in jobs
                if job.state == "failed"
                or (job.state == "pending" and job.attempts)
                or (job.state == "done" and (job.checkpoint, job.dataset) in incomplete)
            ]
            for job in due:
                database.execute(
                    f"UPDATE jobs SET state='pending', attempts=0, not_before=0, {_FREE} "
                    "WHERE checkpoint=? AND dataset=?",
                    (job.checkpoint, job.dataset),
                )
                if job.state == "done":
                    database.execute("DELETE FROM published WHERE checkpoint=?", (job.checkpoint,))
        return due

    def jobs(self) -> list[Job]:
        """All jobs, in the order in which they were entered."""
        return [job_of(row) for row in self._database.rows("SELECT * FROM jobs ORDER BY rowid")]

    def _row(self, key: Iterable[str]) -> sqlite3.Row | None:
        rows = self._database.rows("SELECT * FROM jobs WHERE checkpoint=? AND dataset=?", *key)
        return rows[0] if rows else None

    def _is_anothers(self, row: sqlite3.Row) -> bool:
        holder = Holder(row["host"], row["pid"], row["born"])
        is_at_work = row["state"] == "running" and holder != self.me and not has_died(row)
        return is_at_work or not (self._owners.is_mine_or_gone(row["owner"]) or self._owners.gives_way(row["owner"]))

    def _update(self, job: Job, assignments: str, *values: object) -> bool:
        """Change a job that this process holds."""
        with self._database.transaction() as database:
            cursor = database.execute(
                f"UPDATE jobs SET {assignments} WHERE checkpoint=? AND dataset=? AND digest=? AND state='running' "
                "AND host=? AND pid=? AND born=?",
                (*values, job.checkpoint, job.dataset, job.digest, self.me.host, self.me.pid, self.me.born),
            )
        return cursor.rowcount == 1


def _is_free(row: sqlite3.Row) -> bool:
    if row["state"] == "running":
        return has_died(row)
    return row["state"] == "pending" and row["not_before"] <= time.time()
