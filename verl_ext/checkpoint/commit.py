"""The commit: write the manifest, rename the directory, then point the tracker at it."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from verl_ext.checkpoint.layout import BEST, MANIFEST, TRACKER, Manifest
from verl_ext.checkpoint.retention import holds_on, read_choice
from verl_ext.checkpoint.stock import is_stock
from verl_ext.files import replace_file, sync_directory

REMOVING = ".removing"
"""What the name of a checkpoint ends with while it is removed."""


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the list of what belongs to the checkpoint; with it the directory is complete."""
    replace_file(directory / MANIFEST, [manifest.to_json()])
    for path in [directory, *(child for child in directory.rglob("*") if child.is_dir())]:
        sync_directory(path)


def publish(temporary: Path, final: Path, step: int) -> None:
    """Move a complete directory to its name and make the tracker name it.

    Args:
        temporary: the directory.
        final: its name. A checkpoint that has the name already, of a run that was started over, makes way: one that is
            held, or that verl wrote, is renamed to `..._formerly_TIME`, any other is left for rotation to delete.
        step: for the tracker.
    """
    former = None
    if final.exists():
        former = name_aside(final) if is_stock(final) or holds_on(final) else free_removal_name(final)
        if read_choice(final.parent)[0] == final:  # else it would name the new one, which nobody chose
            os.rename(final.parent / BEST, name_aside(final.parent / BEST))
        os.rename(final, former)
    try:
        os.rename(temporary, final)
    except OSError:
        if former is not None:
            os.rename(former, final)
        raise
    sync_directory(final.parent)
    point_tracker(final.parent, step)


def name_aside(path: Path) -> Path:
    """A name for what is kept though its name is taken."""
    return path.with_name(f"{path.stem}_formerly_{time.time_ns()}{path.suffix}")


def point_tracker(run_dir: Path, step: int) -> None:
    """Make `latest_checkpointed_iteration.txt` name a step, a plain integer as verl's own tools read it."""
    replace_file(run_dir / TRACKER, [str(step)])


def remove_tree(path: Path) -> None:
    """Rename, then delete, so that a crash in between leaves nothing that looks like a checkpoint."""
    doomed = free_removal_name(path)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def free_removal_name(path: Path) -> Path:
    """The name of a directory while it is removed; what an earlier removal left under it is deleted."""
    doomed = path.with_name(f"{path.name}{REMOVING}")
    if doomed.exists():
        shutil.rmtree(doomed)
    return doomed
