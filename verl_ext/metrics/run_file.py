"""Reading and writing the JSON of a run record."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from verl_ext.errors import UserError
from verl_ext.metrics.atomic import replace_file
from verl_ext.metrics.notice import warn

RUN_FILE = "run.json"
IDENTITY_KEYS = (
    "project", "experiment", "stage", "recipe", "total_steps", "config_digest", "untrained_loss", "first_start",
)  # fmt: skip
STATUSES = ("waiting", "running", "finished", "stopped", "failed")

_ATTEMPT_KEYS = frozenset({"attempt", "start", "end"})  # those that the code reads


def load_run(path: Path) -> dict[str, Any]:
    """Read a run record.

    Args:
        path: the `run.json`.

    Returns:
        The record, or that of a run nobody has started when there is no file.

    Raises:
        UserError: the file cannot be read or is not a run record.
    """
    try:
        run = json.loads(path.read_bytes())
    except FileNotFoundError:
        return _new_run()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the run record {path} ({error}); delete it or put it aside") from error
    if not _is_run(run):
        raise UserError(f"{path} is not a run record; delete it or put it aside")
    return {**_new_run(), **run}


def seconds_of(moment: Any) -> float | None:
    """A time of a run record in seconds since 1970; None where it has none yet, or is no time."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (TypeError, ValueError):
        return None


def write_run(path: Path, run: dict[str, Any]) -> None:
    """Replace a run record; a crash leaves the old one or the new one.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [json.dumps(run, indent=2) + "\n"])
    except OSError as error:
        raise UserError(
            f"cannot write the run record {path} ({error.strerror}); make room or make the directory writable"
        ) from error


def set_aside_if_corrupt(path: Path) -> None:
    """Rename a file that is not a run record to `run.json.corrupt`, with a warning, so that a run can go on."""
    try:
        load_run(path)
    except UserError as error:
        aside = path.with_name(f"{path.name}.corrupt")
        warn(f"{error}; it was put aside as {aside.name} and a new record begins")
        os.replace(path, aside)


def _new_run() -> dict[str, Any]:
    return {"status": "waiting", **dict.fromkeys(IDENTITY_KEYS), "attempts": []}


def _is_run(run: Any) -> bool:
    if not isinstance(run, dict) or run.get("status") not in STATUSES or not isinstance(run.get("attempts"), list):
        return False
    return all(isinstance(attempt, dict) and _ATTEMPT_KEYS <= attempt.keys() for attempt in run["attempts"])
