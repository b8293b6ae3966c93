"""What the monitor reads from the files of a run: its configuration, new lines, rows of metrics and events."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from verl_ext.config.run_config import read_config_file
from verl_ext.errors import UserError
from verl_ext.health.rule import LOSS
from verl_ext.metrics.jsonl import METRICS_FILE, MetricsRow, is_count, is_number, parse_row
from verl_ext.metrics.run_record import RUN_FILE, seconds_of
from verl_ext.monitor.database import LogEvent
from verl_ext.monitor.text import format_path

BLOCK_BYTES = 8 << 20
"""Number of bytes to read from a file at a time."""
HEAD_BYTES = 128
"""Number of bytes at the start of a file that identify it."""
_CHECKPOINT = re.compile(r"global_step_\d+(\.\w+)?")
"""Names of checkpoints, including those that are being saved or removed."""
_OUTPUTS = {"eval", "tensorboard", "wandb"}
MAX_CACHED_CONFIGS = 32
DEFAULT_LOG_EVERY = 10


def run_directories(root: Path) -> tuple[list[Path], list[OSError]]:
    """Return the directories below a root with a `run.json` or metrics, and errors for those that cannot be listed.

    Links are followed last, so that a run below the root has its own path; those in a run lead to its data. Directories
    with many files and no runs are not searched: checkpoints, and what a run and its evaluations write.
    """
    found: list[Path] = []
    errors: list[OSError] = []
    seen = {_identity(each) for each in root.resolve().parents if each.exists()}  # a link to one of them is a circle
    tops = [str(root)]
    for top in tops:
        for directory, below, names in os.walk(top, onerror=errors.append):
            is_run = RUN_FILE in names or METRICS_FILE in names
            kept = [each for each in below if not _CHECKPOINT.fullmatch(each) and not (is_run and each in _OUTPUTS)]
            below[:] = sorted(kept)
            try:
                identity = _identity(directory)
            except OSError as error:
                errors.append(error)
                continue
            if identity in seen:
                below.clear()
                continue
            seen.add(identity)
            if is_run:
                found.append(Path(directory))
            else:
                tops += [path for each in below if os.path.islink(path := os.path.join(directory, each))]
    return sorted(found), errors


def _identity(directory: str | Path) -> tuple[int, int]:
    """Return what all paths of a directory share."""
    status = os.stat(directory)
    return status.st_dev, status.st_ino


def stamp_of(path: Path) -> str:
    """Return a string that changes when a file changes.

    Raises:
        OSError: there is no such file.
    """
    status = path.stat()
    return f"{status.st_mtime_ns}:{status.st_size}"


def is_utf8(path: Path) -> bool:
    """Whether a path can be in an address and in the database; the names of other files may have any bytes."""
    return format_path(path) == str(path)


def config_or_empty(directory: Path) -> dict[str, Any]:
    """Return a run's `config.yaml`; empty if it is missing or cannot be read."""
    return _config_or_error(directory)[0]


def config_error(directory: Path) -> str:
    """Say why a run's `config.yaml` cannot be read; empty if it can, or if it is missing."""
    return _config_or_error(directory)[1]


def _config_or_error(directory: Path) -> tuple[dict[str, Any], str]:
    path = directory / "config.yaml"
    try:
        return _read_config(path, stamp_of(path))
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"{path} cannot be read ({error.strerror})"


@lru_cache(MAX_CACHED_CONFIGS)
def _read_config(path: Path, stamp: str) -> tuple[dict[str, Any], str]:
    try:
        return read_config_file(path), ""
    except UserError as error:
        return {}, str(error)


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


def read_new_lines(path: Path, offset: int, head: str) -> NewLines | None:
    """Read new lines of a file, at most `BLOCK_BYTES` or one line, whichever is longer.

    Args:
        path: path of the file.
        offset: number of bytes that were read before.
        head: digest of the file's first bytes at that time; empty if nothing was read.

    Returns:
        The lines; None if the file is missing or has no new lines.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        file = open(path, "rb")
    except FileNotFoundError:
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


def with_counts(record: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a record with None in place of named values that are not counts, because the pages calculate with them."""
    return {**record, **{name: None for name in names if name in record and not is_count(record[name])}}


def parse_rows(lines: Sequence[bytes]) -> tuple[list[MetricsRow], list[bytes], int]:
    """Parse lines of `metrics.jsonl`; returns the rows, their lines, and the number of other lines."""
    rows: list[MetricsRow] = []
    kept: list[bytes] = []
    unreadable = 0
    for line in lines:
        row = parse_row(line)
        if isinstance(row, MetricsRow):
            rows.append(row)
            kept.append(line)
        else:
            unreadable += bool(line.strip())
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
