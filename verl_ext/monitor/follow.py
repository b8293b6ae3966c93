"""The thread that keeps the database up to date."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from verl_ext.errors import one_line
from verl_ext.monitor.store.database import open_database
from verl_ext.monitor.store.ingest import Ingest

TAKE_EVERY_S = 0.3
"""Between two looks at the files of runs."""
FIND_EVERY_S = 3.0
"""Between two looks for new runs."""


class Follower(threading.Thread):
    """Follows every run below a root until it is stopped.

    Args:
        database: to write; this thread alone does.
        root: below which runs lie.
    """

    def __init__(self, database: Path, root: Path) -> None:
        super().__init__(name="follower", daemon=True)
        self._connection = open_database(database)
        self._ingest, self._stopping = Ingest(self._connection, root), threading.Event()

    def run(self) -> None:
        """Look again and again."""
        looked = 0.0
        behind: set[int] = set()  # runs of which more is there than was taken at once
        while not self._stopping.is_set():
            try:
                runs = {*self._ingest.running(), *behind}
                if time.monotonic() - looked > FIND_EVERY_S:  # what does not run may still have changed
                    runs, looked = {*self._ingest.find_runs()}, time.monotonic()
            except Exception as error:  # a full disk, a locked database: it may pass, and pages wait for this thread
                self._ingest.tell_once(f"runs cannot be looked for: {one_line(error)}")
                runs = set()
            behind = {run for run in runs if self._take(run)}
            if not behind:
                self._stopping.wait(TAKE_EVERY_S)

    def _take(self, run: int) -> bool:
        """Read on in a run's files; whether there may be more at once."""
        try:
            return self._ingest.take(run)
        except Exception as error:  # files of any kind may lie there, and people look at the other runs
            self._ingest.tell_once(f"run {run} cannot be followed: {one_line(error)}")
            return False

    def stop(self) -> None:
        """End, once what is under way is written."""
        self._stopping.set()
        self.join()
        self._connection.close()
