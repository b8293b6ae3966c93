"""The thread that follows the files of runs, and adds new lines as rows, events and curve points in transactions.

It never writes to a run. The pages show `RunFollower.runs` and `RunFollower.curves`.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePath

import numpy as np
import orjson

from verl_ext.checkpoint.manifest import step_of
from verl_ext.checkpoint.retention import read_best_file
from verl_ext.console import warn
from verl_ext.errors import UserError, one_line
from verl_ext.health.run_directory import KILLED, max_silence_s, silence_s, why_killed
from verl_ext.metrics.jsonl import EVENTS_FILE, METRICS_FILE, MetricsRow, is_count
from verl_ext.metrics.run_record import RUN_FILE, STATUSES
from verl_ext.monitor.curves import CurveEnvelope, RunCurves
from verl_ext.monitor.database import FilePositions, LogEvent, MonitorDatabase, RunInfo
from verl_ext.monitor.lineage import origin_of
from verl_ext.monitor.run_files import (
    DEFAULT_LOG_EVERY,
    NewLines,
    config_or_empty,
    events_of_attempt,
    events_of_row,
    parse_findings,
    parse_rows,
    read_new_lines,
    run_directories,
    stamp_of,
    with_counts,
)
from verl_ext.monitor.sharing import SharedResults
from verl_ext.monitor.text import format_path

POLL_S = 0.3
"""Seconds between two reads of the files of live runs."""
DISCOVERY_S = 3.0
"""Seconds between two searches for new runs."""
DUMP_ROWS = 4096
"""Number of rows after which the curves of a run are saved; a restart reads at most as many."""
IDLE_S = 60.0
"""Seconds after the last row of a live run until its curves are saved."""
SETTLED_S = 10.0
"""Seconds since the last change of a file after which it is complete, unless its writer was killed."""
MAX_CACHED_CHARTS, MAX_CACHED_FILES = 64, 8
"""Number of drawn charts, of up to 1 MB per metric, and of file contents, of up to 100 MB, that pages share."""
MAX_CACHED_RUNS = 32
"""Number of idle runs whose curves stay in memory, at about 0.2 MB per metric; curves of logging runs always do."""
ATTEMPT_COUNTS = ("first_step", "last_step", "world_size")


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
        self.problems: dict[str, str] = {}  # by path of a file that cannot be read: the reason; replaced, never changed
        self.charts = SharedResults(MAX_CACHED_CHARTS)  # options of charts
        self.files = SharedResults(MAX_CACHED_FILES)  # contents of a run's files
        self._database = MonitorDatabase(database)
        self._curves: OrderedDict[tuple[int, int], RunCurves] = OrderedDict()  # by run and generation
        self._curves_lock = threading.Lock()
        self._has_loaded = False  # since the last eviction; pages load curves, too, but only this thread writes
        self._read_to_end: set[tuple[int, int]] = set()  # runs and generations, by this process
        self._warned: set[str] = set()
        self._found_problems: dict[Path, str] = {}
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
            except Exception as error:  # such as a full disk; it may be temporary, and pages need this thread
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
            UserError: its `run.json` is not the record of a run, or its metrics cannot be read.
        """
        with self._database.transaction():
            run = self._read_record(directory)
        if run is None:
            raise UserError(f"{directory / RUN_FILE} is not the record of a run; delete or rename it")
        while self.read_new_rows(run):
            pass
        if (reason := self._found_problems.get(directory / METRICS_FILE)) is not None:
            raise UserError(f"cannot read {directory / METRICS_FILE} ({reason}); make it readable")
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

    def problems_of(self, run: RunInfo) -> dict[str, str]:
        """Return the reason by path of each file of a run that cannot be read."""
        directory, paths = PurePath(run.path), {PurePath(path): reason for path, reason in self.problems.items()}
        return {
            str(path.relative_to(directory)): reason
            for path, reason in paths.items()
            if directory in (path.parent, _run_of_evaluation(path))
        }

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
            except UnicodeEncodeError:  # neither the database nor an address can have such a path
                self._set_problem(directory / RUN_FILE, "its path is not UTF-8")
            except Exception as error:  # a run's files may contain anything, and must not affect other runs
                self._set_problem(directory / RUN_FILE, one_line(error))
        self._found_problems = {
            path: reason
            for path, reason in self._found_problems.items()
            if path.parent in directories or (_run_of_evaluation(path) in directories and path.exists())
        }
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
            problems = {
                format_path(path.relative_to(self.root)): reason for path, reason in self._found_problems.items()
            }
            if (runs, problems) != (self.runs, self.problems):
                self.runs, self.problems = runs, problems
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
        record, text, problem = {}, "", None
        try:
            text = (directory / RUN_FILE).read_text()
            found = orjson.loads(text)
            if isinstance(found, dict) and found.get("status") in STATUSES:
                record = found if _are_attempts(found.get("attempts")) else {}
                problem = None if record else "not a run record"
            elif (directory / METRICS_FILE).exists():  # otherwise it is another program's file
                problem = "its status is unknown" if isinstance(found, dict) else "not a run record"
        except FileNotFoundError:
            problem = "it is missing" if (directory / METRICS_FILE).exists() else None
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else "not JSON"
        self._set_problem(directory / RUN_FILE, problem)
        known = self._database.find_run(path)
        if not record:
            return None if known is None else known[0]
        if known is not None and known[1] == text:
            return known[0]
        run = self._database.save_run(path, text, with_counts(record, ("total_steps",)))
        attempts = [with_counts(each, ATTEMPT_COUNTS) for each in record.get("attempts") or []]
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
            problem = None
            try:
                stamp = stamp_of(path)
                if known.get(step) != stamp:
                    datasets = orjson.loads(path.read_bytes())["datasets"]
                    metrics = {name: each for name, each in datasets.items() if isinstance(each, dict)}
                    self._database.replace_evaluation(run, step, stamp, metrics)
                    self._runs_changed = True
                there.add(step)
            except FileNotFoundError:  # it was deleted meanwhile
                continue
            except OSError as error:
                problem = error.strerror or one_line(error)
            except ValueError:
                is_settled = time.time() - float(stamp.partition(":")[0]) / 1e9 > SETTLED_S
                problem = "not JSON" if is_settled else None  # otherwise it may be incomplete
            except (TypeError, KeyError, AttributeError):
                pass  # another kind of file
            self._set_problem(path, problem)
        for step in known.keys() - there:
            self._database.replace_evaluation(run, step, "", {})
            self._runs_changed = True
        best = read_best_file(directory)[0] if there else None
        best_step = None if best is None else step_of(best)
        self._runs_changed |= self._database.save_best_step(run, best_step if is_count(best_step) else None)

    def _read_origin(self, run: int, directory: Path) -> None:
        """Read from which run a run started if `config.yaml` has changed."""
        try:
            stamp = stamp_of(directory / "config.yaml")
        except OSError:
            return
        if stamp != self._database.config_stamp(run):
            self._database.save_origin(run, stamp, origin_of(config_or_empty(directory)))
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
        new = self._new_lines(directory / METRICS_FILE, positions.metrics_offset, positions.metrics_head)
        if new is None:
            if (run, generation) not in self._read_to_end:
                if self._database.has_unsaved_rows(run):  # an earlier monitor was killed
                    self._curves_of(run, generation, self._database)
                self._read_to_end.add((run, generation))
            self._maintain_curves(run, generation, is_at_end=True)
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
        self._maintain_curves(run, generation, is_at_end=False)
        self._runs_changed |= new.is_other_file or unreadable > 0
        return bool(new.lines)

    def _maintain_curves(self, run: int, generation: int, is_at_end: bool) -> None:
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
        trainer = config_or_empty(directory).get("trainer")
        every = trainer.get("log_every") if isinstance(trainer, dict) else None
        log_every = every if type(every) is int and every > 0 else DEFAULT_LOG_EVERY
        return (event for row in rows for event in events_of_row(row, log_every))

    def _read_events(self, run: int, path: Path, positions: FilePositions) -> None:
        """Read the new part of `events.jsonl`, which has the findings of the health rules."""
        new = self._new_lines(path, positions.events_offset, positions.events_head)
        if new is None:
            return
        if new.is_other_file:
            self._database.delete_findings(run)
        self._database.add_events(run, parse_findings(new.lines))
        self._database.advance_events(run, new.offset, new.head)
        self._runs_changed = True

    def _new_lines(self, path: Path, offset: int, head: str) -> NewLines | None:
        """Return the new lines of a file; None if there are none, or if it cannot be read, which is a problem."""
        try:
            new = read_new_lines(path, offset, head)
        except OSError as error:
            self._set_problem(path, error.strerror or one_line(error))
            return None
        self._set_problem(path, None)
        return new

    def _set_problem(self, path: Path, reason: str | None) -> None:
        """Note why a file cannot be read; None if it can."""
        if reason is None:
            self._found_problems.pop(path, None)
        else:
            self._found_problems[path] = reason
            self._warn_once(f"{format_path(path)} cannot be read ({reason})")

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(message)


def _run_of_evaluation(path: PurePath) -> PurePath | None:
    """Return the run that a file `eval/eval_step_N/metrics.json` belongs to; None for other files."""
    return path.parents[2] if path.match("eval/eval_step_*/metrics.json") else None


def _are_attempts(value: object) -> bool:
    """Whether a value can be the attempts of a run record; those of other versions may lack values."""
    attempts = [] if value is None else value
    return isinstance(attempts, list) and all(
        isinstance(each, dict) and is_count(each.get("attempt")) for each in attempts
    )
