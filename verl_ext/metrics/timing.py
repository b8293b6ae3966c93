"""Measures time: the parts of a step, the parts of a start, and a trace of every rank."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_ext.console import warn
from verl_ext.errors import first_line_of
from verl_ext.files import LineWriter
from verl_ext.processes import start_ticks

# Steps


class StepTimer:
    """Adds up seconds by part of the step.

    On a GPU, CUDA events around a part's kernels measure its time, so that only `pop` waits for the GPU.

    Args:
        on_gpu: whether the work runs on the current CUDA device.
        on_part: called with name, start and end of every part, in `time.perf_counter` seconds. If set, every part waits
            for the GPU at its start and end, so that the times match its kernels.
    """

    def __init__(self, *, on_gpu: bool = False, on_part: Callable[[str, float, float], None] | None = None) -> None:
        self._on_gpu, self._on_part = on_gpu, on_part
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._launched: list[tuple[str, Any, Any]] = []

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of the `with` block to `part`, even if the block raises."""
        measured = self._by_events if self._on_gpu and self._on_part is None else self._by_clock
        with measured(part):
            yield

    def pop(self) -> dict[str, float]:
        """Return the seconds by part since the last call, and restart from zero."""
        for part, start, end in self._launched:
            end.synchronize()
            self._seconds[part] += start.elapsed_time(end) / 1e3  # from milliseconds
        seconds = dict(self._seconds)
        self._seconds.clear()
        self._launched.clear()
        return seconds

    @contextmanager
    def _by_clock(self, part: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            end = self._now()
            self._seconds[part] += end - start
            if self._on_part is not None:
                self._on_part(part, start, end)

    @contextmanager
    def _by_events(self, part: str) -> Iterator[None]:
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        try:
            yield
        finally:
            end.record()
            self._launched.append((part, start, end))

    def _now(self) -> float:
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()


# Traces

TRACE_DIRECTORY = "trace"


class TraceFile:
    """Timeline of one rank in `trace/attempt_A_rank_R.json`, for Perfetto and chrome://tracing.

    The format is a JSON array of Google's "Trace Event Format". Its closing bracket is optional, so the file is valid
    whenever the rank ends. If the file cannot be written, the trace ends with a warning and the run continues.

    Args:
        attempt: number of the attempt (start) of the run, from 1; replaces the file of a start with that number that
            was not recorded.
    """

    def __init__(self, run_dir: Path, attempt: int, rank: int) -> None:
        self._rank = rank
        self._writer: LineWriter | None = None
        directory = run_dir / TRACE_DIRECTORY
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"attempt_{attempt}_rank_{rank}.json"
            path.unlink(missing_ok=True)
            self._writer = LineWriter(path)
        except OSError as error:
            self._stop(error)
        self._write("[")
        self._event("M", "process_name", 0.0, args={"name": f"rank {rank}"})

    def span(self, name: str, start: float, end: float, **arguments: Any) -> None:
        """Record work of the rank between two `time.perf_counter` times."""
        self._event("X", name, start, dur=(end - start) * 1e6, tid=0, args=arguments)

    def async_span(self, identity: str, name: str, start: float, end: float, **arguments: Any) -> None:
        """Record a phase of something that overlaps the rank's own work, such as a sample."""
        self._event("b", name, start, cat="sample", id=identity, tid=0, args=arguments)
        self._event("e", name, end, cat="sample", id=identity, tid=0)

    def _event(self, kind: str, name: str, moment: float, args: Mapping[str, Any] | None = None, **more: Any) -> None:
        # perf_counter is one clock for all processes of a machine, but not across machines
        event = {"ph": kind, "name": name, "pid": self._rank, "ts": moment * 1e6, **more}
        self._write(json.dumps({**event, "args": dict(args or {})}) + ",")

    def _write(self, line: str) -> None:
        if self._writer is not None:
            try:
                self._writer.write(line)
            except OSError as error:
                self._stop(error)

    def _stop(self, error: OSError) -> None:
        self._writer = None
        warn(f"the trace of rank {self._rank} ends here, because it cannot be written: {first_line_of(error)}")


# Starts

STARTUP_FILE = "startup.json"
"""Passes the launcher's times to its ranks, next to their configuration."""


class StartupTimer:
    """Measures the parts of a start, from the command to the first training step, over all processes in between.

    All processes of a machine share the clock `time.perf_counter`. Each part starts where the previous one ended, so
    the parts add up to the total. The timer does nothing before `begin` or `load`, for example without the launcher.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last: float | None = None

    def begin(self, moment: float) -> None:
        """Restart the timer at a `time.perf_counter` time."""
        self._seconds, self._last = {}, moment

    def mark(self, part: str, moment: float | None = None) -> None:
        """Add the time since the last mark to a part.

        Args:
            moment: end of the part, a `time.perf_counter` time; None for now.
        """
        if self._last is None:
            return
        moment = time.perf_counter() if moment is None else moment
        self._seconds[part] = self._seconds.get(part, 0.0) + moment - self._last
        self._last = moment

    def take(self) -> dict[str, float]:
        """Stop the timer and return the seconds by part and `total`; empty if it was not started."""
        seconds, self._seconds, self._last = self._seconds, {}, None
        return {**seconds, "total": sum(seconds.values())} if seconds else {}

    def save(self, directory: Path) -> None:
        """Stop the timer in this process, so that another process can continue it with `load`."""
        (directory / STARTUP_FILE).write_text(json.dumps({"last": self._last, "seconds": self._seconds}))
        self.take()

    def load(self, directory: Path) -> None:
        """Continue the timer that another process saved, if one did."""
        path = directory / STARTUP_FILE
        if path.exists():
            saved = json.loads(path.read_text())
            self._seconds, self._last = saved["seconds"], saved["last"]


startup = StartupTimer()
"""The timer of this process."""


def process_start() -> float:
    """Return the `time.perf_counter` time at which this process started, to a hundredth of a second."""
    ticks = start_ticks(os.getpid())
    assert ticks is not None  # this process is running
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")  # both include suspended time
    return time.perf_counter() - age
