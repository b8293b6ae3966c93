"""The commit: flush every file, write the manifest, rename the directory, then point the tracker at it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import xxhash

from verl_ext.checkpoint.layout import MANIFEST, TRACKER, Manifest
from verl_ext.metrics.atomic import flush_directory, replace_file

CHUNK_BYTES = 16 << 20


def flush_and_digest(path: Path) -> dict[str, int | str]:
    """Force a file to the disk and return its size in bytes and its XXH3-128 digest.

    The digest finds torn and flipped bytes at memory speed; it is no protection against someone who forges files.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the list of what belongs to the checkpoint; with it the directory is complete."""
    replace_file(directory / MANIFEST, [manifest.to_json()])
    for path in [directory, *(child for child in directory.rglob("*") if child.is_dir())]:
        flush_directory(path)


def publish(temporary: Path, final: Path, step: int) -> None:
    """Move a complete directory to its name and make the tracker name it.

    A checkpoint of the same step (a run started over with `resume_mode=disable`) is moved out of the way first.
    """
    if final.exists():
        remove_tree(final)
    os.rename(temporary, final)
    flush_directory(final.parent)
    replace_file(final.parent / TRACKER, [str(step)])


def remove_tree(path: Path) -> None:
    """Rename, then delete, so that a crash in between leaves nothing that looks like a checkpoint."""
    doomed = path.with_name(f"{path.name}.removing")
    if doomed.exists():
        shutil.rmtree(doomed)
    os.rename(path, doomed)
    shutil.rmtree(doomed)
