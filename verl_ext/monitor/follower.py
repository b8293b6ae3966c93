"""The thread that follows the files of runs, and adds new lines as rows, events and curve points in transactions.

It never writes to a run. The pages show `RunFollower.runs` and `RunFollower.curves`.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from verl_ext.config.run_config import read_config_file
from verl_ext.console import warn
from verl_ext.errors import UserError, one_line
from verl_ext.health.rule import LOSS
from verl_ext.health.run_directory import KILLED, max_silence_s, silence_s, why_killed
from verl_ext.metrics.jsonl import EVENTS_FILE, METRICS_FILE, MetricsRow, is_number
from verl_ext.metrics.run_record import RUN_FILE, STATUSES, seconds_of
from verl_ext.monitor.curves import CurveEnvelope, RunCurves
from verl_ext.monitor.database import FilePositions, LogEvent, MonitorDatabase, RunInfo
from verl_ext.monitor.lineage import origin_of
from verl_ext.monitor.sharing import SharedResults

POLL_S = 0.3
"""Seconds between two reads of the files of live runs."""
DISCOVERY_S = 3.0
"""Seconds between two searches for new runs."""
DUMP_ROWS = 4096
"""Number of rows after which the curves of a run are saved; a restart reads at most as many."""
IDLE_S = 60.0
"""Seconds after the last row of a live run until its curves are saved."""
MAX_CACHED_CHARTS, MAX_CACHED_FILES = 64, 8
"""Number of drawn charts, of up to 1 MB per metric, and of file contents, of up to 100 MB, that pages share."""
MAX_CACHED_RUNS = 32
"""Number of idle runs whose curves stay in memory, at about 0.2 MB per metric; curves of logging runs always do."""
BLOCK_BYTES = 8 << 20
"""Number of bytes to read from a file at a time."""
HEAD_BYTES = 128
"""Number of bytes at the start of a file that identify it."""
MAX_STEP = 1 << 53
"""Larger numbers are not steps."""
ATTEMPT_COUNTS = ("first_step", "last_step", "world_size")
DEFAULT_LOG_EVERY = 10


class RunFollower(threading.Thread):
    """Follows every run below a root until it is stopped.

    Args:
        database: path of the database; only this thread writes to it.
        root: directory that contains the runs.
    """

    def __init__(self, database: Path, root: Path) -> None:
        super().__init__(name="follower", daemon=True)
        self.database_path, self.root = database, root
        self.reader = MonitorDatabase(database)  # for the pages, which all run in one thread
        self.version = 0  # changes when the list of runs changes
        self.runs: dict[str, RunInfo] = {}  # by path; replaced, never changed
        self.charts = SharedResults(MAX_CACHED_CHARTS)  # options of charts
        self.files = SharedResults(MAX_CACHED_FILES)  # contents of a run's files
        self._database = MonitorDatabase(database)
        self._curves: OrderedDict[tuple[int, int], RunCurves] = OrderedDict()  # by run and generation
        self._curves_lock = threading.Lock()
        self._has_loaded = False  # since the last eviction; pages load curves, too, but only this thread writes
        self._read_to_end: set[tuple[int, int]] = set()  # runs and generations, by this process
        self._warned: set[str] = set()
        self._stored_runs: dict[str, RunInfo] = {}
        self._runs_changed = True
        self._database_version = 0
        self._stopping = threading.Event()

    def run(self) -> None:
        """Read the files repeatedly until `stop`."""
        discovered = -DISCOVERY_S
        behind: set[int] = set()  # runs with more new lines than are read at once
        while not self._stopping.is_set():
            try:
                runs = {*self._database.live_runs(), *behind}
                if time.monotonic() - discovered > DISCOVERY_S:  # other runs may have changed, too
                    runs, discovered = {*self.find_runs()}, time.monotonic()
                    self._refresh_runs()  # pages show them while their rows are read
            except (
                Exception
            ) as error:  # such as a full disk or a locked database; it may be temporary, and pages need this thread
                self._warn_once(f"cannot search for runs: {one_line(error)}")
                runs = set()
            behind = {run for run in runs if self._read_or_warn(run)}
            self._refresh_runs()
            if not behind:
                self._stopping.wait(POLL_S)

    def stop(self) -> None:
        """Stop after the current transaction and save the curves, so that a restart shows them at once."""
        self._stopping.set()
        if self.is_alive():
            self.join()
        try:
            with self._database.transaction():
                for (run, generation), curves in [*self._curves.items()]:
                    self._save_curves(run, generation, curves)
        except Exception as error:  # a full disk; the next start reads the rows
            self._warn_once(f"curves cannot be saved: {one_line(error)}")
        self._database.close()
        self.reader.close()

    def read_one(self, directory: Path) -> RunInfo:
        """Read one run to its end, without starting the thread.

        Raises:
            UserError: its `run.json` is not the record of a run.
        """
        with self._database.transaction():
            run = self._read_record(directory)
        if run is None:
            raise UserError(f"{directory / RUN_FILE} is not the record of a run; delete or rename it")
        while self.read_new_rows(run):
            pass
        self._refresh_runs()
        return self.runs[str(directory.relative_to(self.root))]

    # For the pages

    def curves(self, run: RunInfo) -> RunCurves:
        """Return the curves of a run; hold their lock while reading. Later calls may return another object."""
        return self._curves_of(run.id, run.generation, self.reader)

    def zoomed(
        self, run: RunInfo, curves: RunCurves, metrics: Iterable[str], low: float, high: float
    ) -> dict[str, CurveEnvelope]:
        """Return parts of curves, from `low` to `high` in steps, at full resolution; the caller holds their lock.

        Until a save of the curves is complete, these are the curves themselves.
        """
        known = [name for name in metrics if name in curves.envelopes]
        if self.reader.saved_id(run.id) != curves.saved_id:
            return {name: curves.envelopes[name] for name in known}
        none = np.empty((0, 2))
        points = {
            name: np.concatenate([self.reader.points(run.id, name, low, high), curves.unsaved.get(name, none)])
            for name in known
        }
        return {name: CurveEnvelope.of_range(each, low, high) for name, each in points.items()}

    def summary(self, run: RunInfo) -> tuple[int, Mapping[str, float]]:
        """Return the last step of a run and the last value of each metric, without loading its curves."""
        state = self._state_of(run)
        with state.lock:
            return state.step, dict(state.latest)

    def seconds_left(self, run: RunInfo) -> float | None:
        """Return the estimated time until the last step of a running run; None if unknown, or for other runs."""
        if run.status != "running":
            return None
        state = self._state_of(run)
        with state.lock:
            return state.seconds_left(run.total_steps)

    def directory(self, run: RunInfo) -> Path:
        """The directory of a run."""
        return self.root / run.path

    def _state_of(self, run: RunInfo) -> RunCurves:
        """Return the curves of a run from memory, or else the last saved ones, without envelopes."""
        with self._curves_lock:
            return self._curves.get((run.id, run.generation)) or run.saved_state

    def _curves_of(self, run: int, generation: int, database: MonitorDatabase) -> RunCurves:
        with self._curves_lock:
            key = (run, generation)
            if key not in self._curves:
                self._curves[key] = database.load_curves(run)
                self._has_loaded = True
            self._curves.move_to_end(key)
            return self._curves[key]

    def _evict_curves(self) -> None:
        """Save and drop the least recently used curves, except those of logging runs, which need them for each row."""
        self._has_loaded = False
        with self._curves_lock:
            cached = [*self._curves.items()]
        excess = max(0, len(cached) - MAX_CACHED_RUNS)
        idle = (each for each in cached if self._is_idle(each[0][0]))
        for (run, generation), curves in islice(idle, excess):
            self._save_curves(run, generation, curves)
            with self._curves_lock:
                self._curves.pop((run, generation), None)

    def _save_curves(self, run: int, generation: int, curves: RunCurves) -> None:
        """Save curves that have unsaved rows, unless the run was deleted or reset."""
        positions = self._database.positions(run)
        if curves.num_unsaved and positions is not None and positions.generation == generation:
            with curves.lock:
                self._database.catch_up(run, curves)
                self._database.save_curves(run, curves)
            self._runs_changed = True

    # Runs

    def find_runs(self) -> list[int]:
        """Find the runs below the root and read their `run.json` and evaluations; returns their ids.

        A run without a directory is deleted from the database, unless one of its parents cannot be listed: a temporary
        failure of a network disk must not empty the database.
        """
        ids = []
        directories, errors = run_directories(self.root)
        for error in errors:
            was_just_deleted = isinstance(error, FileNotFoundError) and error.filename != str(self.root)
            if not was_just_deleted:
                self._warn_once(
                    f"{error.filename} cannot be listed ({error.strerror}); its runs are shown as last read"
                )
        for directory in directories:
            try:
                with self._database.transaction():
                    if (run := self._read_record(directory)) is not None:
                        self._read_evaluations(run, directory)
                        self._read_origin(run, directory)
                        ids.append(run)
            except Exception as error:  # a run's files may contain anything, and must not affect other runs
                self._warn_once(f"{directory} cannot be followed: {one_line(error)}")
        self._delete_missing({*directories}, [Path(error.filename) for error in errors])
        return ids

    def _delete_missing(self, found: set[Path], unlisted: Sequence[Path]) -> None:
        for run, path in self._database.run_paths().items():
            directory = self.root / path
            if directory not in found and not any(directory.is_relative_to(each) for each in unlisted):
                with self._database.transaction():
                    self._database.delete_run(run)
                self._runs_changed = True

    def _refresh_runs(self) -> None:
        """Publish the list of runs if it has changed."""
        try:
            version = self._database.version()
            if self._runs_changed or version != self._database_version:
                self._stored_runs, self._database_version = self._database.runs(), version
                self._runs_changed = False
            runs = {path: self._with_death(run) for path, run in self._stored_runs.items()}
            if runs != self.runs:
                self.runs = runs
                self.version += 1
        except Exception as error:  # such as a locked database; the next call tries again
            self._warn_once(f"runs cannot be listed: {one_line(error)}")

    def _with_death(self, run: RunInfo) -> RunInfo:
        """Return the run, with status `killed` and the reason if it does not run although its record says so."""
        if run.status not in ("running", "waiting"):
            return run
        state = self._state_of(run)
        allowed = math.inf  # unlimited until the last row and the duration of steps are known
        if (run.id, run.generation) in self._read_to_end:
            with state.lock:
                allowed = max_silence_s(state.step_seconds() or 0.0, state.longest_pause_s)
        try:
            record = orjson.loads(run.record)
            death = why_killed(
                self.directory(run), record, silence_s(record, self._database.last_time(run.id)), allowed
            )
        except Exception:  # a run's files may contain anything, and must not hide other runs
            return run
        return run if death is None else replace(run, status=KILLED, exit_reason=death)

    def _read_record(self, directory: Path) -> int | None:
        """Read `run.json`; returns the run's id, or None if this is not a run record (yet)."""
        path = str(directory.relative_to(self.root))
        try:
            text = (directory / RUN_FILE).read_text()
            record = orjson.loads(text)
        except (OSError, ValueError):
            record, text = None, ""
        known = self._database.find_run(path)
        if not isinstance(record, dict) or record.get("status") not in STATUSES:
            return None if known is None else known[0]
        if known is not None and known[1] == text:
            return known[0]
        run = self._database.save_run(path, text, _with_counts(record, ("total_steps",)))
        attempts = [_with_counts(each, ATTEMPT_COUNTS) for each in record.get("attempts") or []]
        logged = self._database.attempt_events(run)
        self._database.save_attempts(run, attempts)
        events = [event for attempt in attempts for event in events_of_attempt(attempt)]
        self._database.add_events(run, (each for each in events if (each.attempt, each.kind) not in logged))
        self._runs_changed = True
        return run

    def _read_evaluations(self, run: int, directory: Path) -> None:
        """Read each new or changed `eval/eval_step_N/metrics.json`, and drop deleted ones."""
        known, there = self._database.evaluation_stamps(run), set()
        for path in (directory / "eval").glob("eval_step_*/metrics.json"):
            match = re.fullmatch(r"eval_step_(\d{1,15})", path.parent.name)
            if match is None:
                continue
            step = int(match[1])
            try:
                stamp = stamp_of(path)
                if known.get(step) != stamp:
                    datasets = orjson.loads(path.read_bytes())["datasets"]
                    metrics = {name: each for name, each in datasets.items() if isinstance(each, dict)}
                    self._database.replace_evaluation(run, step, stamp, metrics)
                    self._runs_changed = True
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                continue  # incomplete, or another kind of file
            there.add(step)
        for step in known.keys() - there:
            self._database.replace_evaluation(run, step, "", {})
            self._runs_changed = True

    def _read_origin(self, run: int, directory: Path) -> None:
        """Read from which run a run started if `config.yaml` has changed."""
        try:
            stamp = stamp_of(directory / "config.yaml")
        except OSError:
            return
        if stamp != self._database.config_stamp(run):
            self._database.save_origin(run, stamp, origin_of(read_config(directory)))
            self._runs_changed = True

    # Rows and events

    def _read_or_warn(self, run: int) -> bool:
        try:
            return self.read_new_rows(run)
        except Exception as error:  # a run's files may contain anything, and must not affect other runs
            self._warn_once(f"run {run} cannot be followed: {one_line(error)}")
            return False

    def read_new_rows(self, run: int) -> bool:
        """Read the new parts of a run's files; record, rows, events, curves and offsets change in one transaction.

        Returns:
            Whether there may be more to read.
        """
        positions = None
        try:
            with self._database.transaction():
                positions = self._database.positions(run)
                if positions is None:
                    return False
                directory = self.root / positions.path
                self._read_record(directory)
                self._read_events(run, directory / EVENTS_FILE, positions)
                has_more = self._read_metrics(run, directory, positions)
                if self._has_loaded:
                    self._evict_curves()
                return has_more
        except Exception:
            if positions is not None:  # the curves may have rows that the database does not have
                with self._curves_lock:
                    self._curves.pop((run, positions.generation), None)
                    self._curves.pop((run, positions.generation + 1), None)
                self._read_to_end -= {(run, positions.generation), (run, positions.generation + 1)}
            raise

    def _read_metrics(self, run: int, directory: Path, positions: FilePositions) -> bool:
        generation = positions.generation
        new = read_new_lines(directory / METRICS_FILE, positions.metrics_offset, positions.metrics_head)
        if new is None:
            if (run, generation) not in self._read_to_end:
                if self._database.has_unsaved_rows(run):  # an earlier monitor was killed
                    self._curves_of(run, generation, self._database)
                self._read_to_end.add((run, generation))
            self._tend_curves(run, generation, is_at_end=True)
            return False
        if new.is_other_file:
            self._database.forget_rows(run)
            self._read_record(directory)
            generation += 1
        rows, lines, unreadable = parse_rows(new.lines)
        curves = self._curves_of(run, generation, self._database)
        with curves.lock:
            self._database.catch_up(run, curves)
            last_id = self._database.add_rows(run, rows, lines)
            curves.add(rows, self._database.first_steps(run), last_id)
        self._database.add_events(run, self._events_of(directory, rows))
        self._database.advance_metrics(run, new.offset, new.head, unreadable)
        self._tend_curves(run, generation, is_at_end=False)
        self._runs_changed |= new.is_other_file or unreadable > 0
        return bool(new.lines)

    def _tend_curves(self, run: int, generation: int, is_at_end: bool) -> None:
        """Add rows that another monitor read to curves in memory, and save curves occasionally."""
        with self._curves_lock:
            curves = self._curves.get((run, generation))
        if curves is None:
            return
        with curves.lock:
            self._database.catch_up(run, curves)
        is_over = is_at_end and curves.num_unsaved > 0 and self._is_idle(run)
        if is_over or curves.num_unsaved >= DUMP_ROWS:
            self._save_curves(run, generation, curves)

    def _is_idle(self, run: int) -> bool:
        """Whether a run is unlikely to log soon."""
        is_live = run in self._database.live_runs()
        return not is_live or time.time() - self._database.last_time(run) > IDLE_S

    def _events_of(self, directory: Path, rows: Iterable[MetricsRow]) -> Iterator[LogEvent]:
        trainer = read_config(directory).get("trainer")
        every = trainer.get("log_every") if isinstance(trainer, dict) else None
        log_every = every if type(every) is int and every > 0 else DEFAULT_LOG_EVERY
        return (event for row in rows for event in events_of_row(row, log_every))

    def _read_events(self, run: int, path: Path, positions: FilePositions) -> None:
        """Read the new part of `events.jsonl`, which has the findings of the health rules."""
        new = read_new_lines(path, positions.events_offset, positions.events_head)
        if new is None:
            return
        if new.is_other_file:
            self._database.delete_findings(run)
        self._database.add_events(run, parse_findings(new.lines))
        self._database.advance_events(run, new.offset, new.head)
        self._runs_changed = True

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(message)


def run_directories(root: Path) -> tuple[list[Path], list[OSError]]:
    """Return the directories below a root that have a `run.json`, and errors for those that cannot be listed.

    Checkpoints are not searched: they contain many files and no runs.
    """
    found: list[Path] = []
    errors: list[OSError] = []
    for directory, below, names in os.walk(root, onerror=errors.append):
        below[:] = [name for name in below if not name.startswith(("global_step_", "wandb"))]
        if RUN_FILE in names:
            found.append(Path(directory))
    return sorted(found), errors


def stamp_of(path: Path) -> str:
    """Return a string that changes when a file changes.

    Raises:
        OSError: there is no such file.
    """
    status = path.stat()
    return f"{status.st_mtime_ns}:{status.st_size}"


def read_config(directory: Path) -> dict[str, Any]:
    """Return a run's `config.yaml`; empty if it is missing or cannot be read."""
    path = directory / "config.yaml"
    try:
        return _read_config(path, stamp_of(path))
    except OSError:
        return {}


@lru_cache(MAX_CACHED_RUNS)
def _read_config(path: Path, stamp: str) -> dict[str, Any]:
    try:
        return read_config_file(path)
    except UserError:  # the health tab reports it
        return {}


# Lines of a file that another process appends to


@dataclass(frozen=True)
class NewLines:
    """Lines that were appended to a file.

    Attributes:
        lines: complete lines, without newlines.
        offset: start of the next line.
        head: digest of the file's first bytes.
        is_other_file: whether another file was read before; `lines` then start at the beginning of this one.
    """

    lines: list[bytes]
    offset: int
    head: str
    is_other_file: bool


def read_new_lines(path: Path, offset: int, head: str = "") -> NewLines | None:
    """Read new lines of a file, at most `BLOCK_BYTES` or one line, whichever is longer.

    Args:
        path: path of the file.
        offset: number of bytes that were read before.
        head: digest of the file's first bytes at that time; empty if nothing was read.

    Returns:
        The lines; None if the file is missing or has no new lines.
    """
    try:
        file = open(path, "rb")
    except OSError:
        return None
    with file:
        start = file.read(HEAD_BYTES)
        size = file.seek(0, 2)
        # compare as many bytes as the digest covers, because a short file has grown since
        length, _, digest = head.partition(":")
        is_same = not head or (len(start) >= int(length) and _digest(start[: int(length)]) == digest)
        is_other_file = not is_same or size < offset
        offset = 0 if is_other_file else offset
        if size == offset:
            return NewLines([], 0, "", True) if is_other_file else None
        file.seek(offset)
        block = file.read(BLOCK_BYTES)
        while b"\n" not in block and (more := file.read(BLOCK_BYTES)):
            block += more
    end = block.rfind(b"\n") + 1
    if not end and not is_other_file:
        return None
    return NewLines(block[:end].split(b"\n")[:-1], offset + end, f"{len(start)}:{_digest(start)}", is_other_file)


def _digest(start: bytes) -> str:
    return hashlib.sha256(start).hexdigest()[:16]


def is_count(value: Any) -> bool:
    """Whether a value can be a step or an attempt."""
    return isinstance(value, int) and abs(value) < MAX_STEP


def _with_counts(record: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a record with None in place of values that are not counts, because the pages calculate with them."""
    return {**record, **{name: None for name in names if not is_count(record.get(name))}}


def parse_rows(lines: Sequence[bytes]) -> tuple[list[MetricsRow], list[bytes], int]:
    """Parse lines of `metrics.jsonl`; returns the rows, their lines, and the number of other lines."""
    rows: list[MetricsRow] = []
    kept: list[bytes] = []
    unreadable = 0
    for line in lines:
        try:
            metrics: dict[str, Any] = orjson.loads(line)
            step, attempt, logged = metrics.pop("step"), metrics.pop("attempt"), float(metrics.pop("time"))
            if not (is_count(step) and is_count(attempt) and math.isfinite(logged)):
                raise ValueError("not the number of a step or an attempt, or not a time")
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            unreadable += bool(line.strip())
            continue
        rows.append(MetricsRow(step, attempt, logged, metrics))
        kept.append(line)
    return rows, kept, unreadable


# The log


_STEP_PARTS = {
    "reward": "train/reward_total_mean",
    "accuracy": "train/accuracy_mean",
    "latency ms": "train/latency_ms_mean",
    "grad norm": "train/grad_norm",
}
_EVAL_PARTS = {
    "reward": "eval/reward_total_mean",
    "accuracy": "eval/accuracy_mean",
    "latency ms": "eval/latency_ms_mean",
}
_ENDED_WELL = ("all steps", "stopped")
"""Prefixes of exit reasons of attempts that did not fail."""


def events_of_row(row: MetricsRow, log_every: int = DEFAULT_LOG_EVERY) -> Iterator[LogEvent]:
    """Yield the log lines about a row of metrics."""
    step, attempt, time, metrics = row
    if "val/loss" in metrics:
        yield LogEvent(time, attempt, step, "evaluation", f"val/loss {_format(metrics['val/loss'])}")
    elif "eval/reward_total_mean" in metrics:
        parts = [f"{word} {_format(metrics[name])}" for word, name in _EVAL_PARTS.items() if name in metrics]
        yield LogEvent(time, attempt, step, "evaluation", f"eval {', '.join(parts)}")
    if "time/train/save_s" in metrics:
        text = f"checkpoint saved in {_format(metrics['time/train/save_s'])} s"
        yield LogEvent(time, attempt, step, "checkpoint", text)
    if LOSS in metrics and step % log_every == 0:
        parts = [f"loss {_format(metrics[LOSS])}"]
        parts += [f"{word} {_format(metrics[name])}" for word, name in _STEP_PARTS.items() if name in metrics]
        rate = metrics.get("train/lr(1e-3)")
        if isinstance(rate, (int, float)):
            parts.append(f"learning rate {_format(rate / 1e3)}")
        yield LogEvent(time, attempt, step, "step", ", ".join(parts))


def _format(value: Any) -> str:
    return f"{value:.4g}" if is_number(value) and not isinstance(value, str) else str(value)


def events_of_attempt(attempt: Mapping[str, Any]) -> Iterator[LogEvent]:
    """Yield the log lines about the start and end of an attempt in `run.json`."""
    number, reason = attempt["attempt"], attempt.get("exit_reason") or ""
    if (start := seconds_of(attempt.get("start"))) is not None:
        where = f" on {attempt.get('host')}, {attempt.get('world_size')} ranks" if attempt.get("host") else ""
        first = attempt.get("first_step")
        yield LogEvent(start, number, first, "start", f"attempt {number} began at step {first or 0}{where}")
    if (end := seconds_of(attempt.get("end"))) is not None:
        kind = "end" if reason.startswith(_ENDED_WELL) else "failure"
        yield LogEvent(end, number, attempt.get("last_step"), kind, f"attempt {number} ended: {reason}")


def parse_findings(lines: Iterable[bytes]) -> Iterator[LogEvent]:
    """Yield the log lines about lines of `events.jsonl`; torn lines are skipped."""
    for line in lines:
        try:
            found = orjson.loads(line)
            rule, level = str(found["name"]), str(found["level"])
            text, time = f"{rule}: {found['text']}", float(found["time"])
            attempt, step = (each if is_count(each := found.get(name)) else None for name in ("attempt", "step"))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            continue
        if math.isfinite(time):
            yield LogEvent(time, attempt, step, level, text, rule)
