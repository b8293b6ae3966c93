"""`samples.jsonl`, samples for a person to read, and `events.jsonl`, what was said of a run; across all attempts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_ext.files import LineWriter, drop_torn_tail, end_with_newline, parse_json, write_errors

SAMPLES_FILE = "samples.jsonl"
EVENTS_FILE = "events.jsonl"
SampleRow = Mapping[str, str | float | None]


class RecordsFile:
    """Appends records, one JSON object a line; made at the first, so that a run without any has no file."""

    def __init__(self, path: Path, attempt: int) -> None:
        """Append to `path`, from which start of the run, counted from 1."""
        self._path, self._attempt = path, attempt
        self._writer: LineWriter | None = None

    def append(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Write some records of one step.

        Raises:
            UserError: the disk refuses them.
        """
        with write_errors(self._path):
            self._writer = self._writer or self._opened()
            for row in rows:
                self._writer.write(json.dumps({"step": step, "attempt": self._attempt, **row}, ensure_ascii=False))

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._writer is not None:
            self._writer.close()

    def _opened(self) -> LineWriter:
        if self._path.exists():
            drop_torn_tail(self._path, _is_complete)
            end_with_newline(self._path)
        return LineWriter(self._path)


def _is_complete(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False
