"""The commit: write the manifest, rename the directory, then point the tracker at it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from verl_ext.checkpoint.layout import MANIFEST, TRACKER, Manifest
from verl_ext.metrics.atomic import flush_directory, replace_file


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the list of what belongs to the checkpoint; with it the directory is complete."""
    replace_file(directory / MANIFEST, [manifest.to_json()])
    for path in [directory, *(child for child in directory.rglob("*") if child.is_dir())]:
        flush_directory(path)


def publish(temporary: Path, final: Path, step: int, is_held: Callable[[Path], bool]) -> None:
    """Move a complete directory to its name and make the tracker name it.

    Args:
        temporary: the directory.
        final: its name. A checkpoint that has the name already, of a run that was started over, is removed.
        step: for the tracker.
        is_held: whether such a checkpoint must stay; it is then renamed to `..._formerly_TIME`.
    """
    doomed = None
    if final.exists():
        doomed = None if is_held(final) else doomed_name(final)
        os.rename(final, doomed or final.with_name(f"{final.name}_formerly_{time.time_ns()}"))
    os.rename(temporary, final)
    flush_directory(final.parent)
    point_tracker(final.parent, step)
    if doomed is not None:  # which may take long, so the new one is in place first
        shutil.rmtree(doomed)


def point_tracker(run_dir: Path, step: int) -> None:
    """Make `latest_checkpointed_iteration.txt` name a step, a plain integer as verl's own tools read it."""
    replace_file(run_dir / TRACKER, [str(step)])


def remove_tree(path: Path) -> None:
    """Rename, then delete, so that a crash in between leaves nothing that looks like a checkpoint."""
    doomed = doomed_name(path)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def doomed_name(path: Path) -> Path:
    """A free name for a directory that is being removed; what an earlier removal left under it is deleted first."""
    doomed = path.with_name(f"{path.name}.removing")
    if doomed.exists():
        shutil.rmtree(doomed)
    return doomed
