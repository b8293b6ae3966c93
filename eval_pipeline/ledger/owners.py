"""The processes that want jobs done as they stand in the ledger."""

from __future__ import annotations

import sqlite3
import time

from eval_pipeline.ledger.database import Database
from eval_pipeline.ledger.holder import Holder

SCHEMA = "CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, heard REAL NOT NULL);"


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

    def is_mine_or_gone(self, owner: str) -> bool:
        """Whether no other living process wants the job as it stands.

        Args:
            owner: key of its owner.
        """
        if owner == self._me.key:
            return True
        rows = self._database.rows("SELECT heard FROM owners WHERE owner=?", owner)
        return not rows or Holder.of_key(owner).has_died(rows[0]["heard"])
