"""Repair of the files in which W&B keeps the rows of offline attempts."""

from __future__ import annotations

import json
import os
import shlex
import struct
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl_ext.console import typed_path, warn
from verl_ext.errors import one_line
from verl_ext.metrics.jsonl import KEY_COLUMNS

# A .wandb file is a header and LevelDB log blocks. A block has chunks of records: checksum, length, kind, content.
_FILE_HEADER_BYTES, _BLOCK_BYTES = 7, 32 * 1024
_CHUNK_HEADER = struct.Struct("<IHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4
_TAIL_BYTES = 64 * _BLOCK_BYTES
_SETTLED_S = 5.0
"""Seconds without a change after which W&B's service no longer writes a file."""


class LoggedRows(NamedTuple):
    """What the newest offline file of a W&B run has.

    Attributes:
        num_steps: number of W&B's own steps.
        last: the last row of metrics, with `global_step` and `attempt`; empty if there is none.
    """

    num_steps: int = 0
    last: Mapping[str, Any] = {}


def sync_command(directory: Path, pattern: str) -> str:
    """The command that uploads runs from the files of a run or an evaluation.

    Args:
        directory: parent of the directory `wandb`.
        pattern: shell pattern for the run directories in `wandb`.
    """
    python, files = (shlex.quote(typed_path(path)) for path in (sys.executable, directory / "wandb"))
    return f"{python} -m wandb sync {files}/{pattern}"


def repair_offline_files(directory: Path, run_id: str) -> LoggedRows:
    """Repair the files that killed attempts left, because `wandb sync` uploads no attempt after a damaged file.

    W&B writes blocks of 32 KiB, so that a kill usually cuts a record off. The rest of that record is removed, and so is
    a file that does not even have the description of the run.

    Args:
        directory: parent of the directory `wandb`.

    Returns:
        The rows in the newest file; none if the newest attempt was online, or if its file may still be written.
    """
    paths = Path(directory, "wandb").glob(f"*run-*-{run_id}/run-{run_id}.wandb")
    logged = LoggedRows()
    for path in sorted(paths, key=lambda path: path.parent.name.removeprefix("offline-")):
        if not path.parent.name.startswith("offline-"):
            logged = LoggedRows()
            continue
        try:
            if time.time() - path.stat().st_mtime < _SETTLED_S:
                logged = LoggedRows()
            else:
                logged = _repair(path) or logged
        except Exception as error:  # W&B works without old files
            warn(f"cannot repair {path}, so `wandb sync` may skip later attempts: {one_line(error)}")
    return logged


def _repair(path: Path) -> LoggedRows | None:
    """Remove an incomplete record from the end of a file; return its rows, or None if nothing was left."""
    size = path.stat().st_size
    start = max(0, size - _TAIL_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES
    records, end = _read_records(path, start)
    if not records:  # a record longer than the tail
        start = 0
        records, end = _read_records(path, start)
    if start == 0 and len(records) < 2:  # the second one describes the run
        path.unlink()
        return None
    if end < size:
        os.truncate(path, end)
    return _logged_rows(records)


def _read_records(path: Path, start: int) -> tuple[list[bytes], int]:
    """Return the complete records of a file from a block on, and the offset of the end of the last one."""
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read()
    records: list[bytes] = []
    parts: list[bytes] | None = None
    position = end = 0 if start else _FILE_HEADER_BYTES
    while position + _CHUNK_HEADER.size <= len(data):
        room = _BLOCK_BYTES - position % _BLOCK_BYTES
        _, length, kind = _CHUNK_HEADER.unpack_from(data, position)
        if room < _CHUNK_HEADER.size or kind == 0:  # the rest of the block is empty
            position += room
            continue
        begin, position = position + _CHUNK_HEADER.size, position + _CHUNK_HEADER.size + length
        if position > len(data):
            break
        if kind in (_WHOLE, _FIRST):
            parts = []
        if parts is not None:  # else the record began before `start`
            parts.append(data[begin:position])
        if kind in (_WHOLE, _LAST):
            end = position
            records += [b"".join(parts)] if parts is not None else []
            parts = None
    return records, start + end


def _logged_rows(records: Sequence[bytes]) -> LoggedRows:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # a generated class

    num_steps = 0
    for content in reversed(records):
        record = Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            num_steps = max(num_steps, row.get("_step", -1) + 1)
            if "attempt" in row:
                return LoggedRows(num_steps, row)
    return LoggedRows(num_steps)


def rows_after(last: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of `metrics.jsonl` after the one that W&B logged last; none if that one is not among them."""
    found: list[Mapping[str, Any]] | None = None
    for row in rows if last else ():
        is_last = (row["step"], row["attempt"]) == (last.get("global_step"), last.get("attempt"))
        if is_last and row.keys() - KEY_COLUMNS <= last.keys():  # a step has rows of training, validation and saves
            found = []
        elif found is not None:
            found.append(row)
    return found or []
