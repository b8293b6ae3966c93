"""Which figures were written and which went to W&B: a kill in between is made up, and nothing is done twice."""

from __future__ import annotations

from eval_pipeline.ledger.database import Database

SCHEMA = "CREATE TABLE IF NOT EXISTS published (checkpoint TEXT PRIMARY KEY, digest TEXT NOT NULL, tracked TEXT);"


class Published:
    """A row for each checkpoint whose figures are out; digests are of the jobs that they sum up.

    Args:
        database: of the ledger.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def digest(self, checkpoint: str) -> str | None:
        """Of the figures that were written last."""
        return self._value("digest", checkpoint)

    def mark(self, checkpoint: str, digest: str) -> None:
        """Remember that figures were written; "" that they were removed."""
        with self._database.transaction() as database:
            database.execute(
                "INSERT INTO published VALUES (?, ?, NULL) ON CONFLICT DO UPDATE SET digest=excluded.digest",
                (checkpoint, digest),
            )

    def tracked(self, checkpoint: str) -> str | None:
        """Of the figures that were sent to W&B last."""
        return self._value("tracked", checkpoint)

    def mark_tracked(self, checkpoint: str, digest: str) -> None:
        """Remember that written figures were sent to W&B."""
        with self._database.transaction() as database:
            database.execute("UPDATE published SET tracked=? WHERE checkpoint=?", (digest, checkpoint))

    def _value(self, column: str, checkpoint: str) -> str | None:
        rows = self._database.rows(f"SELECT {column} FROM published WHERE checkpoint=?", checkpoint)
        return rows[0][column] if rows else None
