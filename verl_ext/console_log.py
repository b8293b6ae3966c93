"""`console.log`: what the launcher and the ranks of a run print, with the time and the process of each line.

It holds what Python prints, including tracebacks and warnings. Output of native libraries, such as NCCL, goes only to
the terminal or the job's own log.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from verl_ext.console import printable, warn
from verl_ext.files import LineWriter

CONSOLE_LOG = "console.log"


@contextmanager
def recording_console(run_dir: Path, process: str) -> Iterator[None]:
    """Within the block, also append what this process prints to `console.log`; a file that fails is one warning.

    Args:
        run_dir: the run directory.
        process: name of the process in the file, such as `rank 1`.
    """
    try:
        log = ConsoleLog(run_dir / CONSOLE_LOG, process)
    except OSError as error:
        warn(f"the output is not recorded: {run_dir / CONSOLE_LOG} cannot be opened ({error.strerror})")
        yield
        return
    previous = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (RecordedStream(stream, log) for stream in previous)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = previous
        log.close()


class ConsoleLog:
    """Appends lines of one process to a file that all processes of the run share.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, process: str) -> None:
        self._path, self._process, self._lock = path, process, threading.Lock()
        self._writer: LineWriter | None = LineWriter(path)

    def write(self, line: str) -> None:
        """Append a line; after a failure, all later lines are dropped."""
        with self._lock:
            writer = self._writer
            if writer is None:
                return
            try:
                writer.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {self._process}: {printable(line)}")
                return
            except OSError as error:
                self._writer, reason = None, error.strerror
        warn(f"the output is no longer recorded: {self._path} cannot be written ({reason})")

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()
            self._writer = None


class RecordedStream:
    """A text stream whose complete lines also go to a `ConsoleLog`; otherwise, it is the stream itself."""

    def __init__(self, stream: TextIO, log: ConsoleLog) -> None:
        self._stream, self._log, self._part = stream, log, ""

    def write(self, text: str) -> int:
        """Write to the stream, and record complete lines as a terminal would show them at their end."""
        count = self._stream.write(text)
        *lines, self._part = (self._part + text).split("\n")
        for line in lines:
            shown = line.rstrip("\r").rpartition("\r")[2]  # progress bars redraw a line after a carriage return
            if shown.strip():
                self._log.write(shown)
        if self._part.count("\r") > 1:  # a bar that is drawn for hours has no newline
            self._part = self._part[self._part.rindex("\r") :]
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
