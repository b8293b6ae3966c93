"""Reading and writing the JSON of a run record."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from verl_ext.console import warn
from verl_ext.errors import UserError
from verl_ext.files import parse_json, replace_file

RUN_FILE = "run.json"
IDENTITY_KEYS = (
    "project", "experiment", "stage", "recipe", "total_steps", "config_digest", "untrained_loss", "first_start",
    "precision",
)  # fmt: skip
STATUSES = ("waiting", "running", "finished", "stopped", "failed")

_TEXT, _COUNT = (str, type(None)), (int, type(None))
_PRECISIONS = ("bf16", "fp32", None)
_TYPES = {
    **dict.fromkeys(("project", "experiment", "stage", "recipe", "config_digest"), _TEXT),
    "total_steps": _COUNT,
    "untrained_loss": (int, float, type(None)),
}
_TYPES_OF_AN_ATTEMPT = {
    **{"attempt": (int,), "start": (str,)},
    **dict.fromkeys(("end", "exit_reason", "host"), _TEXT),
    **dict.fromkeys(("first_step", "last_step", "world_size", "pid"), _COUNT),
}
_KEYS_OF_AN_ATTEMPT = frozenset({"attempt", "start", "end"})
"""Those that the code reads without asking whether they are there."""
_LARGEST = 2**63 - 1  # what a database can hold


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
        run = parse_json(path.read_bytes())
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
    except (TypeError, ValueError, OverflowError):
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
    """Whether the content of a `run.json` is a run record: every key has a value of its type."""
    if not isinstance(run, dict) or run.get("status") not in STATUSES or not _has_types(run, _TYPES):
        return False
    attempts = run.get("attempts")
    return (
        run.get("precision") in _PRECISIONS
        and isinstance(attempts, list)
        and all(
            isinstance(each, dict) and _KEYS_OF_AN_ATTEMPT <= each.keys() and _has_types(each, _TYPES_OF_AN_ATTEMPT)
            for each in attempts
        )
    )


def _has_types(content: dict[str, Any], types: Mapping[str, tuple[type, ...]]) -> bool:
    found = [(content[name], allowed) for name, allowed in types.items() if name in content]
    return all(
        type(value) in allowed and (type(value) is not int or abs(value) <= _LARGEST) for value, allowed in found
    )
