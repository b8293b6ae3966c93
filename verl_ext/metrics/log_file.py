"""`train.log`: what the console shows of a run, with the time of each line, over all its attempts."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from verl_ext.files import LineWriter
from verl_ext.metrics.console import ConsoleLines

LOG_FILE = "train.log"


class LogFile(ConsoleLines):
    """Writes the console's lines to a file.

    Args:
        path: of the file, which is continued.
        total_steps: see `ConsoleLines`.
        log_every: see `ConsoleLines`.

    Raises:
        OSError: it cannot be opened.
    """

    name = "log file"

    def __init__(self, path: Path, *, total_steps: int, log_every: int) -> None:
        super().__init__(total_steps=total_steps, log_every=log_every, show=self._write_line)
        self._writer = LineWriter(path)

    def close(self, exit_code: int = 0) -> None:
        """Close the file."""
        self._writer.close()

    def _write_line(self, text: str) -> None:
        self._writer.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} - INFO - {text}")
