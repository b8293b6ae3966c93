"""Replacing a small file so that a reader or a crash sees the old text or the new one, never half of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def replace_file(path: Path, lines: Iterable[str]) -> None:
    """Write `lines` beside `path`, flush them to the disk, and rename the result over `path`.

    Args:
        path: the file to replace or create; its directory must exist.
        lines: the new content in pieces, written one after another as UTF-8.

    Raises:
        OSError: the directory is missing, not writable, or full; `path` then keeps its old content.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8", newline="") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    flush_directory(path.parent)


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
