"""Compares a checkpoint's files with the digests in its manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from verl_ext.checkpoint.layout import Manifest
from verl_ext.checkpoint.stock import is_stock, what_is_wrong_inside
from verl_ext.files import file_digest, ignore_progress


def damaged_files(
    checkpoint: Path,
    names: Iterable[str] | None = None,
    progress: Callable[[int], None] = ignore_progress,
) -> dict[str, str]:
    """Read files of a checkpoint and find those that are not what was saved.

    Of one that verl wrote nobody knows a digest; what `torch.save` wrote has checksums of its own.

    Args:
        checkpoint: a `global_step_N` directory.
        names: the files to read, relative to it; None reads all that the manifest lists.
        progress: told the number of bytes of each piece that was read.

    Returns:
        Name and what is wrong, for the damaged ones alone.

    Raises:
        ValueError: the manifest is missing or malformed.
    """
    files = Manifest.read(checkpoint).files
    if is_stock(checkpoint):
        archives = [name for name in (files if names is None else names) if name.endswith(".pt")]
        found = {name: what_is_wrong_inside(checkpoint / name, progress) for name in archives}
        return {name: problem for name, problem in found.items() if problem is not None}
    problems = {
        name: _problem(checkpoint / name, files[name], progress) if name in files else "is not in the manifest"
        for name in (files if names is None else names)
    }
    return {name: problem for name, problem in problems.items() if problem is not None}


def _problem(path: Path, entry: dict[str, Any], progress: Callable[[int], None]) -> str | None:
    try:
        num_bytes = path.stat().st_size
        if num_bytes != entry.get("bytes"):
            return f"has {num_bytes} bytes instead of {entry.get('bytes')}"
        digest = file_digest(path, progress)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:  # a disk that fails is what this looks for
        return f"cannot be read ({error.strerror})"
    return None if digest == entry.get("xxh3_128") else f"has the digest {digest} instead of {entry.get('xxh3_128')}"
