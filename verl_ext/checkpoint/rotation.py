"""Removes the checkpoints that nothing keeps; decided from the disk, so a restarted run forgets nothing."""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from verl_ext.checkpoint.commit import REMOVING, remove_tree
from verl_ext.checkpoint.layout import BEST, MANIFEST, TRACKER, Manifest
from verl_ext.checkpoint.lease import DEFAULT_SECONDS
from verl_ext.checkpoint.retention import Retention, holds_on, read_choice, reasons_to_keep
from verl_ext.files import TEMPORARY, replace_file

Warn = Callable[[str], None]
ENDINGS = (TEMPORARY, REMOVING)
REPLACED = re.compile(
    rf"(run\.json|config\.yaml|{re.escape(BEST)}|{re.escape(TRACKER)}|{re.escape(MANIFEST)}|lease\..+\.json"
    rf"|(training|validation)_history\.csv|wandb_run_id\.txt|(best_model|checkpoint_epoch_\d+)\.pt)"
    rf"{re.escape(TEMPORARY)}"
)
"""Temporary names of the files that are replaced in a run directory and its checkpoints."""
EVALUATION = "eval"
REPLACED_BY_EVALUATION = re.compile(rf".+\.(json|jsonl|md|npz|png){re.escape(TEMPORARY)}")
"""The same of the files below `eval/`, whose names tell of data sets and digests."""
OPTIMIZER = "optimizer"
OPTIMIZER_FILES = "optim_world_size_*.pt"


@dataclass(frozen=True)
class Plan:
    """What rotation is going to do.

    Attributes:
        reasons: every complete checkpoint, the newest first, and why it is kept.
        remove: the checkpoints to remove, the oldest first.
        strip: those to take the optimizer shards from.
    """

    reasons: dict[Path, list[str]]
    remove: list[Path]
    strip: list[Path]


def rotate(run_dir: Path, retention: Retention, step: int, warn: Warn) -> list[Path]:
    """Remove what rotation does not keep, and leftovers of saves and removals that were cut short.

    Only the process that saves may call it, while no save is going on: every `*.tmp` goes.

    Args:
        run_dir: holds `global_step_N` directories.
        retention: what to keep.
        step: the run's step; checkpoints beyond it count as older than all others (see `reasons_to_keep`).
        warn: receives a sentence for what cannot be removed; the run goes on.

    Returns:
        The checkpoints that were removed, the oldest first.
    """
    remove_leftovers(run_dir, warn)
    _, problem = read_choice(run_dir)
    if problem and retention.max_to_keep is not None:
        warn(f"{run_dir / BEST} {problem}, so no checkpoint is removed; repair or delete it")
    return carry_out(plan_rotation(run_dir, retention, step), warn)


def remove_leftovers(run_dir: Path, warn: Warn) -> None:
    """Remove what saves and removals that were cut short left; the conditions are those of `rotate`."""
    for path in find_leftovers(run_dir):
        _attempt(shutil.rmtree, path, warn)
    for path in find_temporary_files(run_dir):
        _attempt(Path.unlink, path, warn)


def find_leftovers(run_dir: Path) -> list[Path]:
    """Directories of saves and removals that are going on or were cut short."""
    return [path for ending in ENDINGS for path in sorted(run_dir.glob(f"global_step_*{ending}"))]


def find_temporary_files(run_dir: Path) -> list[Path]:
    """Temporary files of processes that were killed before the rename; those of a live process are younger."""
    found = [*sorted(run_dir.glob(f"*{TEMPORARY}")), *sorted(run_dir.glob(f"global_step_*/*{TEMPORARY}"))]
    found = [path for path in found if REPLACED.fullmatch(path.name)]
    for folder, _, names in os.walk(run_dir / EVALUATION):
        found += [Path(folder, name) for name in sorted(names) if REPLACED_BY_EVALUATION.fullmatch(name)]
    return [path for path in found if _is_old_file(path)]


def _is_old_file(path: Path) -> bool:
    try:
        state = path.lstat()
    except OSError:  # it has its name by now
        return False
    return stat.S_ISREG(state.st_mode) and state.st_mtime < time.time() - DEFAULT_SECONDS


def plan_rotation(run_dir: Path, retention: Retention, step: int) -> Plan:
    """Decide without touching anything; the arguments are those of `rotate`."""
    reasons = reasons_to_keep(run_dir, retention, step)
    remove = [path for path, why in reversed(reasons.items()) if not why]
    only_best = [retention.best_reason] if retention.drop_optimizer_of_best else None
    strip = [path for path, why in reasons.items() if why and _has_optimizer_to_drop(path, why == only_best)]
    return Plan(reasons, remove, strip)


def carry_out(plan: Plan, warn: Warn) -> list[Path]:
    """Do what was planned; what fails is warned about and left.

    Returns:
        The checkpoints that were removed, the oldest first.
    """
    removed = [path for path in plan.remove if _is_free(path, warn) and _attempt(remove_tree, path, warn)]
    for path in plan.strip:  # last, as it writes a manifest, for which a full disk has room only now
        _attempt(drop_optimizer, path, warn)
    return removed


def drop_optimizer(checkpoint: Path) -> None:
    """Delete the optimizer's shards; what remains is a complete checkpoint that says what it lacks.

    The manifest goes first: a crash in between leaves files that belong to nothing, which the next rotation deletes.

    Raises:
        OSError: the manifest cannot be replaced or a shard cannot be deleted.
    """
    manifest = Manifest.read(checkpoint)
    shards = list(checkpoint.glob(OPTIMIZER_FILES))
    if OPTIMIZER not in manifest.dropped:
        names = {path.name for path in shards}
        files = {name: entry for name, entry in manifest.files.items() if name not in names}
        smaller = replace(manifest, files=files, dropped=(*manifest.dropped, OPTIMIZER))
        replace_file(checkpoint / MANIFEST, [smaller.to_json()])
    for path in shards:
        path.unlink()


def _has_optimizer_to_drop(checkpoint: Path, is_only_best: bool) -> bool:
    try:
        cut_short = OPTIMIZER in Manifest.read(checkpoint).dropped
    except ValueError:  # removed meanwhile
        return False
    return (is_only_best or cut_short) and any(checkpoint.glob(OPTIMIZER_FILES))


def _is_free(checkpoint: Path, warn: Warn) -> bool:
    # asked again, since removing the ones before it may have taken minutes
    holds = holds_on(checkpoint)
    if holds:
        warn(f"{checkpoint} stays for this time, since meanwhile {' and '.join(holds)}")
    return not holds


def _attempt(action: Callable[[Path], None], path: Path, warn: Warn) -> bool:
    try:
        action(path)
    except OSError as error:
        warn(f"what is superfluous in {path} could not be removed ({error}); it stays on the disk")
        return False
    return True
