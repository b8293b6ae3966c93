"""`run.json`: the identity of a run, its status, and its attempts (starts)."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from verl_ext.console import warn
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import parse_json, replace_file, write_errors
from verl_ext.metrics.jsonl import METRICS_FILE, iter_metrics
from verl_ext.processes import boot_id, pid_namespace, start_ticks

RUN_FILE = "run.json"
STATUSES = ("waiting", "running", "finished", "stopped", "failed")
EndStatus = Literal["finished", "stopped", "failed"]
LOST = "killed or lost; the attempt did not record its end"


class RunIdentity(TypedDict, total=False):
    """Properties of a run that the launcher records before training starts."""

    project: str
    experiment: str
    stage: str
    recipe: str | None
    config_digest: str
    untrained_loss: float | None
    first_start: str
    precision: str | None


_TEXT, _COUNT = (str, type(None)), (int, type(None))
_PRECISIONS = ("bf16", "fp32", None)
_TYPES = {
    **dict.fromkeys(("project", "experiment", "stage", "recipe", "config_digest"), _TEXT),
    "total_steps": _COUNT,
    "untrained_loss": (int, float, type(None)),
    "launch": (dict,),
}
_ATTEMPT_TYPES = {
    **{"attempt": (int,), "start": (str,)},
    **dict.fromkeys(("end", "exit_reason", "host", "boot_id"), _TEXT),
    **dict.fromkeys(("first_step", "last_step", "world_size", "pid", "pid_start_ticks", "pid_namespace"), _COUNT),
    "closed_trackers": (list,),
    "heartbeat_s": (float, type(None)),
    **dict.fromkeys(("command", "git_commit"), _TEXT),
    **dict.fromkeys(("packages", "environment", "config_defaults", "config_changes", "input_files"), (dict,)),
    "device_names": (list,),
}
_REQUIRED_ATTEMPT_KEYS = frozenset({"attempt", "start", "end"})
_LARGEST_INT = 2**63 - 1  # limit of the monitor's database


class RunRecord:
    """Reads and updates the `run.json` of a run directory, which may not exist yet.

    Only one process at a time may update the file.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = Path(run_dir)
        self._path = self._run_dir / RUN_FILE
        self._before: str | None = None

    def read(self) -> dict[str, Any]:
        """Return the record; see `load_run`."""
        return load_run(self._path)

    def first_start(self) -> datetime | None:
        """Return the local time of the run's first start; None if the run never started or the record lacks it.

        Raises:
            UserError: see `load_run`.
        """
        run = self.read()
        # records without `first_start` have the start of the first attempt
        for moment in (run["first_start"], *(attempt["start"] for attempt in run["attempts"][:1])):
            seconds = seconds_of(moment)
            if seconds is not None:
                return datetime.fromtimestamp(seconds)
        return None

    def next_attempt(self) -> int:
        """Return the number that `start_attempt` will return.

        Raises:
            UserError: a damaged file cannot be renamed.
        """
        return self._next_number(self._load())

    def mark_waiting(self, launch: Mapping[str, Any] | None = None, **identity: Unpack[RunIdentity]) -> None:
        """Record that a launch was requested but has not started training; earlier attempts stay.

        Args:
            launch: facts about this launch, which the next attempt records.

        Raises:
            UserError: the file cannot be written.
        """
        run = self._load()
        if self._before is None and self._path.exists():
            self._before = self._path.read_text(encoding="utf-8")
        self._create_directory()
        self._write({**run, **identity, "status": "waiting", "launch": dict(launch or {})})

    def start_attempt(
        self,
        *,
        first_step: int,
        world_size: int,
        total_steps: int,
        precision: str | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> int:
        """Record that training begins, and return the number of the attempt, from 1.

        If a kill left an earlier attempt open, its last row of metrics closes it.

        Args:
            first_step: step from which this attempt starts.
            provenance: further facts about the attempt, such as the names of its devices.

        Raises:
            UserError: the file cannot be written.
        """
        run = self._load()
        self._close_lost_attempt(run)
        number = self._next_number(run)
        launch = run.pop("launch", {})
        attempt = _attempt(number, first_step=first_step, world_size=world_size)
        run["attempts"].append({**attempt, **launch, **(provenance or {})})
        self._create_directory()
        self._write({**run, "status": "running", "total_steps": total_steps, "precision": precision})
        return number

    def end_attempt(
        self, status: EndStatus, last_step: int | None, exit_reason: str, closed_trackers: list[str] | None = None
    ) -> None:
        """Record how the open attempt ended.

        Args:
            status: `finished` (all steps completed), `stopped` (on request) or `failed`.
            last_step: last completed step; None reads it from `metrics.jsonl`.
            exit_reason: one sentence.
            closed_trackers: trackers that received the end of the run; None if unknown.

        Raises:
            UserError: no attempt is open, or the file cannot be written.
        """
        run = self._load()
        attempt = _open_attempt(run)
        if attempt is None:
            raise UserError(f"{self._path} has no open attempt to end; another process may have changed it")
        if last_step is None:
            last_step, _ = self._last_row_of(attempt["attempt"])
        attempt.update(end=_now(), last_step=last_step, exit_reason=exit_reason)
        if closed_trackers is not None:
            attempt["closed_trackers"] = closed_trackers
        self._write({**run, "status": status})

    def end_if_running(self, status: EndStatus, exit_reason: str) -> bool:
        """Mark the run as `failed` or `stopped` if it has not ended; the launcher calls this after its ranks ended.

        Ranks that ended before training started count as an attempt, so that the reason is recorded. Returns whether
        the record changed.

        Raises:
            UserError: the file cannot be written.
        """
        run = self._load()
        if run["status"] in ("finished", "stopped", "failed"):
            return False
        if run["status"] == "waiting":
            self._close_lost_attempt(run)
            launch = run.pop("launch", {})
            run["attempts"].append({**_attempt(self._next_number(run)), **launch})
            self._write(run)
        self.end_attempt(status, None, exit_reason)
        return True

    def replace_failure(self, exit_reason: str) -> None:
        """Replace the reason of the last attempt if the run has failed.

        Raises:
            UserError: the file cannot be written.
        """
        run = self._load()
        if run["status"] == "failed":
            run["attempts"][-1]["exit_reason"] = exit_reason
            self._write(run)

    def end_refused(self, reason: str) -> None:
        """Record that this launch was refused after `mark_waiting`.

        If the run was finished or stopped before and has logged nothing since, its record is restored: a mistake on the
        command line must not turn a finished run into a failed one. Any other run is marked as failed.

        Raises:
            UserError: the file cannot be written.
        """
        run = self._load()
        previous = None if self._before is None else parse_json(self._before)
        if previous is None or previous["status"] not in ("finished", "stopped") or run["status"] == "finished":
            self.end_if_running("failed", reason)
            return
        started = {attempt["attempt"] for attempt in run["attempts"][len(previous["attempts"]) :]}
        if started and any(row["attempt"] in started for row in self._rows()):
            self.end_if_running("failed", reason)
        else:
            self._write(previous)

    def _load(self) -> dict[str, Any]:
        """Return the record; rename a damaged file to `run.json.corrupt`, with a warning, so that the run can start."""
        try:
            return load_run(self._path)
        except UserError as error:
            aside = self._path.with_name(f"{RUN_FILE}.corrupt")
            with write_errors(aside):
                os.replace(self._path, aside)
            warn(f"{error}; it was renamed to {aside.name} and replaced with a new record")
            return _new_run()

    def _create_directory(self) -> None:
        with write_errors(self._run_dir):
            self._run_dir.mkdir(parents=True, exist_ok=True)

    def _write(self, run: dict[str, Any]) -> None:
        with write_errors(self._path):
            replace_file(self._path, [json.dumps(run, indent=2) + "\n"])

    def _close_lost_attempt(self, run: dict[str, Any]) -> None:
        attempt = _open_attempt(run)
        if attempt is not None:
            step, time = self._last_row_of(attempt["attempt"])
            end = attempt["start"] if time is None else _iso(time)
            attempt.update(end=end, last_step=step, exit_reason=LOST)

    def _next_number(self, run: dict[str, Any]) -> int:
        numbers = [attempt["attempt"] for attempt in run["attempts"]]
        if not numbers:  # the numbers of a lost record must not be reused, because metrics.jsonl has rows with them
            numbers = [row["attempt"] for row in self._rows()]
        return 1 + max(numbers, default=0)

    def _last_row_of(self, attempt: int) -> tuple[int | None, float | None]:
        """Return the last step and time (seconds since 1970) that the attempt logged."""
        step, time = None, None
        for row in self._rows():
            if row["attempt"] == attempt:
                step, time = max(row["step"], step or 0), row["time"]
        return step, time

    def _rows(self) -> Iterable[dict[str, Any]]:
        path = self._run_dir / METRICS_FILE
        return iter_metrics(path) if path.exists() else ()


def load_run(path: Path) -> dict[str, Any]:
    """Read a run record.

    Returns:
        The record. If there is no file: status `waiting`, no attempts, and None for the other keys.

    Raises:
        UserError: the file cannot be read or is not a run record.
    """
    try:
        run = parse_json(path.read_bytes())
    except FileNotFoundError:
        return _new_run()
    except (OSError, ValueError) as error:
        remedy = "make it readable" if isinstance(error, OSError) else "delete or rename it"
        raise UserError(f"cannot read the run record {path} ({first_line_of(error)}); {remedy}") from error
    if not _is_run(run):
        raise UserError(f"{path} is not a run record; delete or rename it")
    return {**_new_run(), **run}


def require_run_files(run_dir: Path, *names: str) -> None:
    """Require `run.json` and files that a run writes after it.

    Raises:
        UserError: the directory is not that of a run or cannot be read, or a file is missing.
    """
    try:
        missing = [name for name in (RUN_FILE, *names) if not (run_dir / name).is_file()]
    except OSError as error:
        raise UserError(f"cannot read {run_dir} ({error.strerror}); make it readable") from error
    if RUN_FILE in missing:
        raise UserError(
            f"{run_dir} has no {RUN_FILE}, so no run has started there; specify the directory of a run, such as "
            "checkpoints/<project>/<experiment>"
        )
    if missing:
        raise UserError(
            f"{run_dir} has no {missing[0]}; the run failed before its first step, has not reached it yet, or lost the "
            "file: see console.log there"
        )


def seconds_of(moment: Any) -> float | None:
    """Convert a time of a run record to seconds since 1970; None if it is missing or not a time."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _new_run() -> dict[str, Any]:
    return {"status": "waiting", **dict.fromkeys((*RunIdentity.__annotations__, "total_steps")), "attempts": []}


def _is_run(run: Any) -> bool:
    """Whether all values have the right types."""
    if not isinstance(run, dict) or run.get("status") not in STATUSES or not _has_types(run, _TYPES):
        return False
    attempts = run.get("attempts")
    return (
        run.get("precision") in _PRECISIONS
        and isinstance(attempts, list)
        and all(
            isinstance(each, dict) and _REQUIRED_ATTEMPT_KEYS <= each.keys() and _has_types(each, _ATTEMPT_TYPES)
            for each in attempts
        )
    )


def _has_types(content: dict[str, Any], types: Mapping[str, tuple[type, ...]]) -> bool:
    found = [(content[name], allowed) for name, allowed in types.items() if name in content]
    return all(
        type(value) in allowed and (type(value) is not int or abs(value) <= _LARGEST_INT) for value, allowed in found
    )


def _attempt(number: int, *, first_step: int | None = None, world_size: int | None = None) -> dict[str, Any]:
    return {
        "attempt": number,
        "start": _now(),
        "end": None,
        "first_step": first_step,
        "last_step": None,
        "world_size": world_size,
        "exit_reason": None,
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "pid": os.getpid(),
        "pid_start_ticks": start_ticks(os.getpid()),
        "pid_namespace": pid_namespace(),
    }


def _open_attempt(run: dict[str, Any]) -> dict[str, Any] | None:
    last = run["attempts"][-1] if run["attempts"] else None
    return last if last is not None and last["end"] is None else None


def _now() -> str:
    return _iso(datetime.now(UTC).timestamp())


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
