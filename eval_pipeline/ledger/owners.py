"""The processes that want jobs done as they stand in the ledger."""

from __future__ import annotations

import sqlite3
import time

from eval_pipeline.ledger.database import Database
from eval_pipeline.ledger.holder import Holder

SCHEMA = """
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, heard REAL NOT NULL);
CREATE TABLE IF NOT EXISTS blocked (owner TEXT PRIMARY KEY);
"""


class Owners:
    """Tells the owners that live from those that have gone.

    Args:
        database: of the ledger.
        me: this process.
    """

    def __init__(self, database: Database, me: Holder) -> None:
        self._database, self._me = database, me

    def enter(self, connection: sqlite3.Connection) -> None:
        """Be among them; within a transaction, as is `beat`."""
        connection.execute("INSERT OR IGNORE INTO owners VALUES (?, ?)", (self._me.key, time.time()))

    def beat(self, connection: sqlite3.Connection) -> None:
        """Be heard of."""
        connection.execute("UPDATE owners SET heard=? WHERE owner=?", (time.time(), self._me.key))

    def block(self, connection: sqlite3.Connection) -> None:
        """Remember that this process waits for another's end; within a transaction."""
        connection.execute("INSERT OR IGNORE INTO blocked VALUES (?)", (self._me.key,))

    def gives_way(self, owner: str) -> bool:
        """Whether an owner that waits itself leaves its jobs to this process, which was here first.

        Of two that wait for each other's end one has to go on, or neither would ever end.

        Args:
            owner: key of another owner.
        """
        rows = self._database.rows(
            "SELECT 1 FROM owners AS mine, owners AS its JOIN blocked ON blocked.owner = its.owner "
            "WHERE mine.owner=? AND its.owner=? AND mine.rowid < its.rowid",
            self._me.key,
            owner,
        )
        return bool(rows)

    def is_mine_or_gone(self, owner: str) -> bool:
        """Whether no other living process wants the job as it stands.

        Args:
            owner: key of its owner.
        """
        if owner == self._me.key:
            return True
        rows = self._database.rows("SELECT heard FROM owners WHERE owner=?", owner)
        return not rows or Holder.of_key(owner).has_died(rows[0]["heard"])
