"""When what happened on a rank, as Chrome's trace events, which Perfetto and chrome://tracing show.

The format is described in Google's "Trace Event Format": a JSON array, whose end may be missing, so that the file is
whole whenever the rank ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ext.console import warn
from verl_ext.files import LineWriter

TRACE_DIRECTORY = "trace"


class Trace:
    """Appends events of one rank to a file of its own, `trace/attempt_A_rank_R.json` in the run directory."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Begin a file beside those of earlier starts."""
        directory = run_dir / TRACE_DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        number = 1 + len(list(directory.glob(f"attempt_*_rank_{rank}.json")))
        self._writer = LineWriter(directory / f"attempt_{number}_rank_{rank}.json")
        self._rank, self._refused = rank, False
        self._write("[")
        self._event("M", "process_name", 0.0, args={"name": f"rank {rank}"})

    def part(self, name: str, start: float, end: float, **arguments: Any) -> None:
        """Something that the rank did from one moment of `time.perf_counter` to another."""
        self._event("X", name, start, dur=(end - start) * 1e6, tid=0, args=arguments)

    def life(self, identity: str, name: str, start: float, end: float, **arguments: Any) -> None:
        """A part of something's life that goes on beside the rank's own work, such as a sample's."""
        self._event("b", name, start, cat="sample", id=identity, tid=0, args=arguments)
        self._event("e", name, end, cat="sample", id=identity, tid=0)

    def _event(self, kind: str, name: str, moment: float, args: Mapping[str, Any] | None = None, **more: Any) -> None:
        # perf_counter is one clock for all processes of a machine, and not of several
        event = {"ph": kind, "name": name, "pid": self._rank, "ts": moment * 1e6, **more}
        self._write(json.dumps({**event, "args": dict(args or {})}) + ",")

    def _write(self, line: str) -> None:
        """A run is worth more than its trace: where the disk refuses it, the trace ends here."""
        if not self._refused:
            try:
                self._writer.write(line)
            except OSError as error:
                self._refused = True
                warn(f"the trace of rank {self._rank} ends here: {error.strerror}")
