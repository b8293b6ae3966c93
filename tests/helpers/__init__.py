"""What tests share. Test modules import from here, never from one another."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""


def tree_of(directory: Path) -> dict[str, tuple[bytes | None, int]]:
    """Content (None of a directory) and time of the last change of everything in a directory, and of itself."""
    paths = [directory, *directory.rglob("*")]
    return {str(path): (path.read_bytes() if path.is_file() else None, path.lstat().st_mtime_ns) for path in paths}
