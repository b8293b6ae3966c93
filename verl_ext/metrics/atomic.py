"""Small files: replaced so that nobody ever sees half of one, and parsed without trust in what they hold."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp"
"""What the name of a file or directory ends with until it is complete."""
LATEST = 1e11
"""Upper bound for times in seconds since 1970 (year 5138); a later time is damage and may not convert to a date."""


def replace_file(path: Path, lines: Iterable[str]) -> None:
    """Write `lines` beside `path`, flush them to the disk, and rename the result over `path`.

    Args:
        path: the file to replace or create; its directory must exist.
        lines: the new content in pieces, written one after another as UTF-8.

    Raises:
        OSError: the directory is missing, not writable, or full; `path` then keeps its old content.
    """
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    flush_directory(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name under which to write a file's new content, which is renamed over the file at the end of the block.

    Raises:
        OSError: it cannot be renamed. After any failure nothing is left of the new content.
    """
    temporary = path.with_name(f"{path.name}{TEMPORARY}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # the first failure is the one to report
            temporary.unlink()
        raise


def flush_directory(directory: Path) -> None:
    """Force a directory's entries to the disk, without which a rename in it can be lost with the power.

    Args:
        directory: an existing directory.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON document that may be damaged.

    Raises:
        ValueError: it is not JSON, or is nested too deeply to be parsed.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
