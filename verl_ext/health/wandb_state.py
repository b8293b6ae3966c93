"""How a W&B run ended, from the file that its client wrote here, online or offline.

The file is a LevelDB log: blocks of 32 KiB, in them parts of records, each behind a checksum, a length and a kind.
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Iterator
from pathlib import Path

HEADER_BYTES, BLOCK_BYTES = 7, 32 * 1024
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4
READ_BLOCKS = 8
"""Blocks at the end of the file in which a run's end is looked for."""


def wandb_end(run_dir: Path) -> int | None:
    """Exit code of the newest W&B run of a run directory; None where it has no end, there is none, or no W&B here."""
    files = sorted(run_dir.glob("wandb/*run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    if not files or importlib.util.find_spec("wandb") is None:
        return None
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # made for each protobuf version

    code = None
    for content in last_records(files[-1]):
        record = Record.FromString(content)
        if record.WhichOneof("record_type") == "exit":
            code = record.exit.exit_code
    return code


def last_records(path: Path) -> Iterator[bytes]:
    """Whole records of the last blocks."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        start = max(0, size // BLOCK_BYTES - READ_BLOCKS + 1) * BLOCK_BYTES
        file.seek(start)
        data = file.read()
    position, parts = (HEADER_BYTES if start == 0 else 0), None  # the file has a header of its own
    while position + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:  # the rest of a block has no room for another header
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER_BYTES])
        part = data[position + HEADER_BYTES : position + HEADER_BYTES + length]
        position += HEADER_BYTES + length
        if kind in (WHOLE, FIRST):
            parts = b""
        if parts is None or len(part) < length:  # the record began before what was read, or is being written
            continue
        parts += part
        if kind in (WHOLE, LAST):
            yield parts
            parts = None
