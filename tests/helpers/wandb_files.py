"""Reads the files of offline W&B runs."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.processes import wait_until

if TYPE_CHECKING:
    from wandb.proto.wandb_internal_pb2 import Record

_HEADER_BYTES, _BLOCK_BYTES = 7, 32 * 1024
_WHOLE, _LAST = 1, 4


def read_records(path: Path) -> list[Record]:
    """The records of a .wandb file; waits for the end of the run, which W&B's service writes in the background."""

    def complete() -> list[Record]:
        records = list(parse_records(path.read_bytes()))
        has_ended = any(record.WhichOneof("record_type") == "exit" for record in records)
        return records if has_ended else []

    return wait_until(complete, pause_s=0.05)


def parse_records(data: bytes) -> Iterator[Record]:
    """A 7-byte header, then LevelDB log blocks of 32 KiB with records in one or more parts."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, parts = _HEADER_BYTES, b""
    while position + _HEADER_BYTES <= len(data):
        if _BLOCK_BYTES - position % _BLOCK_BYTES < _HEADER_BYTES:  # the rest of a block has no room for a header
            position += _BLOCK_BYTES - position % _BLOCK_BYTES
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + _HEADER_BYTES])
        end = position + _HEADER_BYTES + length
        if end > len(data):
            return  # it is being written
        parts += data[position + _HEADER_BYTES : end]
        position = end
        if kind in (_WHOLE, _LAST):
            yield Record.FromString(parts)
            parts = b""


def values_of(items: Any) -> dict[str, Any]:
    """Name to value of a record's items."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def read_history(path: Path) -> list[dict[str, Any]]:
    """The rows that were logged."""
    records = (record for record in read_records(path) if record.WhichOneof("record_type") == "history")
    return [values_of(record.history.item) for record in records]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics that a file has now."""
    records = [values_of(record.history.item) for record in parse_records(path.read_bytes())]
    return [row for row in records if "attempt" in row]
