"""New whole lines of a file that another process appends to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 8 << 20
"""Read at a time."""
HEAD_BYTES = 128
"""Of a file's beginning, by which it is known."""


@dataclass(frozen=True)
class NewLines:
    """What a file has got.

    Attributes:
        lines: whole ones, without their newlines.
        offset: where the next ones begin.
        head: digest of the file's first bytes.
        is_other: whether this is not the file that was read before, so that `lines` are from its beginning.
    """

    lines: list[bytes]
    offset: int
    head: str
    is_other: bool


def read_new(path: Path, offset: int, head: str = "") -> NewLines | None:
    """Read on, at most `BLOCK_BYTES` or one line, if that is longer.

    Args:
        path: of the file; None is returned where there is none, or nothing new.
        offset: bytes that were read.
        head: digest then; empty for a file of which nothing was read.
    """
    try:
        file = open(path, "rb")
    except OSError:
        return None
    with file:
        start = file.read(HEAD_BYTES)
        size = file.seek(0, 2)
        # a digest over as many bytes as there were when it was made: the beginning of a file grows as well
        length, _, digest = head.partition(":")
        same = not head or (len(start) >= int(length) and _digest(start[: int(length)]) == digest)
        is_other = not same or size < offset
        offset = 0 if is_other else offset
        if size == offset:
            return NewLines([], 0, "", True) if is_other else None
        file.seek(offset)
        block = file.read(BLOCK_BYTES)
        while b"\n" not in block and (more := file.read(BLOCK_BYTES)):
            block += more
    end = block.rfind(b"\n") + 1
    if not end and not is_other:
        return None
    return NewLines(block[:end].split(b"\n")[:-1], offset + end, f"{len(start)}:{_digest(start)}", is_other)


def _digest(start: bytes) -> str:
    return hashlib.sha256(start).hexdigest()[:16]
