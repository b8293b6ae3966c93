"""`run.json`: what a run is, how it stands, and every start of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from verl_ext.errors import UserError
from verl_ext.files import parse_json
from verl_ext.metrics.jsonl import METRICS_FILE, iterate_metrics
from verl_ext.metrics.run_file import IDENTITY_KEYS, RUN_FILE, load_run, seconds_of, set_aside_if_corrupt, write_run

END_STATUSES = ("finished", "stopped", "failed")
LOST = "ended without a word (killed or lost)"


class RunRecord:
    """Reads and updates the `run.json` of one run directory; one process at a time may update it."""

    def __init__(self, run_dir: Path) -> None:
        """Point at a run directory, which need not exist yet."""
        self._run_dir = Path(run_dir)
        self._path = self._run_dir / RUN_FILE
        self._before: str | None = None

    def read(self) -> dict[str, Any]:
        """Return the record; one that was never written is waiting, has no attempts, and None for the rest.

        Raises:
            UserError: the file is not a run record, for example torn by a crash of the disk.
        """
        return load_run(self._path)

    def first_start(self) -> datetime | None:
        """Local time of the run's first start; None if it was never started, or its record does not say.

        Raises:
            UserError: see `read`.
        """
        run = self.read()
        # records of earlier versions have the start of the first attempt alone
        for moment in (run["first_start"], *(attempt["start"] for attempt in run["attempts"][:1])):
            seconds = seconds_of(moment)
            if seconds is not None:
                return datetime.fromtimestamp(seconds)
        return None

    def mark_waiting(self, **identity: Any) -> None:
        """Record that the run is asked for and has not started; earlier attempts stay.

        Args:
            identity: any of `IDENTITY_KEYS`.

        Raises:
            UserError: another key is given, or the file cannot be written.
        """
        if unknown := sorted(identity.keys() - set(IDENTITY_KEYS)):
            raise UserError(f"a run has no {', '.join(unknown)}; known are {', '.join(sorted(IDENTITY_KEYS))}")
        run = self._load()
        if self._before is None and self._path.exists():
            self._before = self._path.read_text(encoding="utf-8")
        self._write({**run, **identity, "status": "waiting"})

    def start_attempt(self, *, first_step: int, world_size: int, total_steps: int, precision: str | None = None) -> int:
        """Record that training begins; an attempt that a kill left open is closed from its last row of metrics.

        Args:
            first_step: the step this attempt starts from.
            world_size: number of ranks.
            total_steps: optimizer steps of the whole run.
            precision: number type of the forward pass.

        Returns:
            The number of the attempt, from 1.

        Raises:
            UserError: the file cannot be written.
        """
        run = self._load()
        self._close_lost_attempt(run)
        number = self._next_number(run)
        run["attempts"].append(_attempt(number, first_step=first_step, world_size=world_size))
        self._write({**run, "status": "running", "total_steps": total_steps, "precision": precision})
        return number

    def end_attempt(self, status: str, last_step: int | None, exit_reason: str) -> None:
        """Record how the open attempt ended.

        Args:
            status: `finished` (all steps done), `stopped` (asked to stop) or `failed`.
            last_step: the last step that was done; None takes it from `metrics.jsonl`.
            exit_reason: one sentence for people.

        Raises:
            UserError: the status is another, no attempt is open, or the file cannot be written.
        """
        if status not in END_STATUSES:
            raise UserError(f"an attempt ends {', '.join(END_STATUSES)}, not '{status}'")
        run = self._load()
        attempt = _open_attempt(run)
        if attempt is None:
            raise UserError(f"{self._path} has no open attempt to end")
        if last_step is None:
            last_step, _ = self._last_row_of(attempt["attempt"])
        attempt.update(end=_now(), last_step=last_step, exit_reason=exit_reason)
        self._write({**run, "status": status})

    def end_if_running(self, status: str, exit_reason: str) -> bool:
        """Mark the run as `failed` or `stopped` if it has not ended; for the launcher, after its ranks died.

        Ranks that died before training began count as an attempt of their own, so that the reason is kept.

        Args:
            status: `stopped` (asked to stop) or `failed`.
            exit_reason: one sentence for people.

        Returns:
            Whether anything was changed.

        Raises:
            UserError: the file cannot be written.
        """
        run = self._load()
        if run["status"] in END_STATUSES:
            return False
        if run["status"] == "waiting":
            self._close_lost_attempt(run)
            run["attempts"].append(_attempt(self._next_number(run)))
            self._write(run)
        self.end_attempt(status, None, exit_reason)
        return True

    def end_refused(self, reason: str) -> None:
        """Record that this launch was refused after `mark_waiting`.

        A run that was finished or stopped before, and has logged nothing since, keeps the record that it had: a mistake
        on the command line must not turn a finished run into a failed one. Any other run has failed.

        Args:
            reason: one sentence for people.

        Raises:
            UserError: the file cannot be written.
        """
        run = self._load()
        former = None if self._before is None else parse_json(self._before)
        if former is None or former["status"] not in ("finished", "stopped") or run["status"] == "finished":
            self.end_if_running("failed", reason)
            return
        begun = {attempt["attempt"] for attempt in run["attempts"][len(former["attempts"]) :]}
        if begun and any(row["attempt"] in begun for row in self._rows()):
            self.end_if_running("failed", reason)
        else:
            self._write(former)

    def _load(self) -> dict[str, Any]:
        set_aside_if_corrupt(self._path)
        return load_run(self._path)

    def _write(self, run: dict[str, Any]) -> None:
        write_run(self._path, run)

    def _close_lost_attempt(self, run: dict[str, Any]) -> None:
        attempt = _open_attempt(run)
        if attempt is not None:
            step, time = self._last_row_of(attempt["attempt"])
            end = attempt["start"] if time is None else _iso(time)
            attempt.update(end=end, last_step=step, exit_reason=LOST)

    def _next_number(self, run: dict[str, Any]) -> int:
        numbers = [attempt["attempt"] for attempt in run["attempts"]]
        if not numbers:  # a record that was lost or set aside must not give the number of a logged attempt again
            numbers = [row["attempt"] for row in self._rows()]
        return 1 + max(numbers, default=0)

    def _last_row_of(self, attempt: int) -> tuple[int | None, float | None]:
        """Return the largest step and the latest time (seconds since 1970) that the attempt logged."""
        step, time = None, None
        for row in self._rows():
            if row["attempt"] == attempt:
                step, time = max(row["step"], step or 0), row["time"]
        return step, time

    def _rows(self) -> Iterable[dict[str, Any]]:
        path = self._run_dir / METRICS_FILE
        return iterate_metrics(path) if path.exists() else ()


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
        "pid": os.getpid(),
    }


def _open_attempt(run: dict[str, Any]) -> dict[str, Any] | None:
    last = run["attempts"][-1] if run["attempts"] else None
    return last if last is not None and last["end"] is None else None


def _now() -> str:
    return _iso(datetime.now(UTC).timestamp())


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
