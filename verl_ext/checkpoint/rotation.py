"""Which checkpoints stay on the disk; decided from the disk, so a restarted run forgets nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from verl_ext.checkpoint.commit import remove_tree
from verl_ext.checkpoint.layout import BEST, KEEP, list_steps, step_of, what_is_wrong


def rotate(run_dir: Path, max_to_keep: int | None, step: int, warn: Callable[[str], None]) -> list[Path]:
    """Remove what rotation does not keep, and leftovers of saves and removals that were cut short.

    Args:
        run_dir: holds `global_step_N` directories.
        max_to_keep: newest complete checkpoints to keep; None keeps all.
        step: the run's step. Checkpoints beyond it are those of a former run in the same directory, which was started
            over with `resume_mode=disable`; they count as older than all others.
        warn: receives a sentence for a directory that cannot be removed; the run goes on.

    Returns:
        The checkpoints that were removed.
    """
    leftovers = [path for ending in ("tmp", "removing") for path in run_dir.glob(f"global_step_*.{ending}")]
    try:
        doomed = to_remove(run_dir, max_to_keep, step)
    except (ValueError, KeyError, TypeError) as error:
        doomed = []
        warn(f"{run_dir / BEST} cannot be read ({error}), so no checkpoint is removed; repair or delete it")
    for path in leftovers + doomed:
        try:
            shutil.rmtree(path) if path in leftovers else remove_tree(path)
        except OSError as error:
            warn(f"{path} could not be removed ({error.strerror}); it stays on the disk")
    return doomed


def to_remove(run_dir: Path, max_to_keep: int | None, step: int) -> list[Path]:
    """Complete checkpoints beyond the newest `max_to_keep` that nothing holds, the oldest first."""
    if max_to_keep is None:
        return []
    complete = [path for path in list_steps(run_dir) if what_is_wrong(path) is None]
    complete.sort(key=lambda path: (step_of(path) or 0) > step)  # stable: each part stays the newest first
    best = best_step_directory(run_dir)
    return [path for path in reversed(complete[max_to_keep:]) if path.name != best and not (path / KEEP).exists()]


def best_step_directory(run_dir: Path) -> str | None:
    """Name of the checkpoint that `best_checkpoint.json` chose, None where there is no choice yet."""
    path = run_dir / BEST
    if not path.is_file():
        return None
    return f"global_step_{json.loads(path.read_text())['step']}"
