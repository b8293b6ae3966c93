"""One evaluation of one checkpoint on one data set."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Literal

from eval_pipeline.ledger.holder import has_died

State = Literal["pending", "running", "done", "failed"]


@dataclass(frozen=True)
class Job:
    """One row of the ledger.

    Attributes:
        checkpoint: label of the model, such as `step_200`.
        dataset: name of the data set in the recipe.
        tier: 1, 2 or 3.
        digest: of everything that decides the figures; a row of another digest is out of date.
        state: pending, running, done or failed; pending also where the process that was at work has died.
        attempts: how often it was begun and failed.
        not_before: seconds since 1970 before which a failed job is not begun again.
        worker: who works on it, in words.
        seconds: wall-clock seconds spent on it, by phase.
        started: seconds since 1970 of the first claim.
        ended: seconds since 1970 of its end.
        error: why the last attempt failed.
    """

    checkpoint: str
    dataset: str
    tier: int
    digest: str
    state: State
    attempts: int
    not_before: float
    worker: str | None
    seconds: dict[str, float]
    started: float | None
    ended: float | None
    error: str | None

    @property
    def key(self) -> tuple[str, str]:
        """Checkpoint and data set, of which the ledger has one row."""
        return self.checkpoint, self.dataset

    @property
    def has_ended(self) -> bool:
        """Done or given up."""
        return self.state in ("done", "failed")


def job_of(row: sqlite3.Row) -> Job:
    """A job from its row."""
    is_abandoned = row["state"] == "running" and has_died(row)
    return Job(
        checkpoint=row["checkpoint"],
        dataset=row["dataset"],
        tier=row["tier"],
        digest=row["digest"],
        state="pending" if is_abandoned else row["state"],
        attempts=row["attempts"],
        not_before=row["not_before"],
        worker=None if is_abandoned else row["worker"],
        seconds=json.loads(row["seconds"]),
        started=row["started"],
        ended=row["ended"],
        error=row["error"],
    )
