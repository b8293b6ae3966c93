"""The SQLite file below the ledger; its errors are sentences.

A rollback journal, since write-ahead logs do not work on network file systems. Writers take the lock at the start of
their transaction (`BEGIN IMMEDIATE`), so a claim that was read as free is still free when it is taken.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_ext.errors import UserError, first_line_of

BUSY_S = 60.0
"""How long a statement waits for another process's transaction."""


class Database:
    """An open file.

    Args:
        path: made when missing, with its directory.
        schema: statements that may be run again and again.

    Raises:
        UserError: here and by every method: the file cannot be made, read or written, or is no such database, or
            lacks a column of the schema.
    """

    def __init__(self, path: Path, schema: str) -> None:
        self.path = path
        with self._in_words():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
            self._connection.row_factory = sqlite3.Row
            self._connection.executescript(schema)
            missing = _missing_columns(self._connection, schema)
        if missing:
            self._connection.close()
            raise UserError(
                f"another version wrote the ledger {path}, which lacks {missing[0]}; delete the file; answers and "
                "verdicts are stored elsewhere and are reused"
            )

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        """What a query finds."""
        with self._in_words():
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All changes of the block or none of them, alone."""
        with self._in_words():
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # a request to stop may come before it began or after it was committed
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"cannot use the ledger {self.path} ({first_line_of(error)}); free disk space or delete the file"
            ) from error


def _missing_columns(connection: sqlite3.Connection, schema: str) -> list[str]:
    """Columns that a schema makes and a file does not have, as `table.column`."""
    empty = sqlite3.connect(":memory:")
    empty.executescript(schema)
    query = "SELECT each.name || '.' || column.name FROM sqlite_master AS each, pragma_table_info(each.name) AS column"
    wanted, found = ([row[0] for row in each.execute(query)] for each in (empty, connection))
    empty.close()
    return [name for name in wanted if name not in found]
