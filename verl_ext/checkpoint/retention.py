"""Which checkpoints stay and why, and the removal of the others. Decided from the disk, so restarts change nothing.

Needs no torch.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from verl_ext.checkpoint.config import CheckpointConfig
from verl_ext.checkpoint.lease import DEFAULT_SECONDS, lease_holders
from verl_ext.checkpoint.manifest import (
    BEST,
    DROPPED_OPTIMIZER,
    KEEP,
    MANIFEST,
    OPTIMIZER,
    TRACKER,
    Manifest,
    complete_checkpoints,
    is_verl_checkpoint,
    shards_of,
    step_of,
)
from verl_ext.errors import first_line_of
from verl_ext.files import TEMPORARY, parse_json, replace_file

Warn = Callable[[str], None]
REMOVING = ".removing"
"""Suffix of a checkpoint while it is removed."""
REPLACED = re.compile(
    rf"(run\.json|config\.yaml|{re.escape(BEST)}|{re.escape(TRACKER)}|{re.escape(MANIFEST)}|lease\..+\.json"
    rf"|(training|validation)_history\.csv|wandb_run_id\.txt|(best_model|checkpoint_epoch_\d+)\.pt)"
    rf"{re.escape(TEMPORARY)}"
)
"""Temporary names of files that are replaced atomically in a run directory and its checkpoints."""
EVALUATION = "eval"
REPLACED_BY_EVALUATION = re.compile(rf".+\.(json|jsonl|md|npz|png){re.escape(TEMPORARY)}")
"""The same for files below `eval/`, whose names contain data sets and digests."""


# Reasons to keep a checkpoint


def reasons_to_keep(
    run_dir: Path, max_to_keep: int | None, config: CheckpointConfig, step: int
) -> dict[Path, list[str]]:
    """Every complete checkpoint, the newest first, with the reasons to keep it; one without reasons can go.

    Args:
        run_dir: holds `global_step_N` directories.
        max_to_keep: number of newest checkpoints to keep; None keeps all.
        config: which checkpoints are the best ones to keep.
        step: the run's step. Checkpoints of later steps are those of an earlier run in the same directory, which was
            restarted with `resume_mode=disable`; they count as older than all others.
    """
    found = complete_checkpoints(run_dir)
    # a stable sort: both groups stay in order, the newest first
    checkpoints = dict(sorted(found.items(), key=lambda item: (step_of(item[0]) or 0) > step))
    by_verl = [path for path in checkpoints if is_verl_checkpoint(path)]  # never removed, and not counted
    own = [path for path in checkpoints if path not in by_verl]
    chosen, problem = read_best_file(run_dir)
    rules: list[tuple[str, Collection[Path]]] = [
        ("max_ckpt_to_keep is null" if max_to_keep is None else _one_of(max_to_keep, "newest"), own[:max_to_keep]),
        ("verl itself wrote it", by_verl),
        (_best_reason(config), _best(checkpoints, config)),
        (f"{BEST} names it", () if chosen is None else (chosen,)),
        (f"{BEST} {problem}", checkpoints if problem else ()),  # it may name any of them
    ]
    return {path: [why for why, kept in rules if path in kept] + _holds_inside(path) for path in checkpoints}


def read_best_file(run_dir: Path) -> tuple[Path | None, str | None]:
    """The checkpoint that `best_checkpoint.json` names, if any, and what is wrong with a file that names none."""
    try:
        step = parse_json((run_dir / BEST).read_bytes())["step"]
    except FileNotFoundError:
        return None, None
    except KeyError as error:
        return None, f"cannot be read (it lacks {error})"
    except (OSError, ValueError, TypeError) as error:
        return None, f"cannot be read ({first_line_of(error)})"
    if type(step) is not int:
        return None, f"has the step {repr(step)[:40]}, which is not a whole number"
    return run_dir / f"global_step_{step}", None


def why_held(checkpoint: Path) -> list[str]:
    """What holds a checkpoint at any age: a file `keep` in it, a reader's lease, `best_checkpoint.json`."""
    chosen, problem = read_best_file(checkpoint.parent)
    named = [f"{BEST} names it"] if checkpoint == chosen else []
    return _holds_inside(checkpoint) + named + ([f"{BEST} {problem}"] if problem else [])


def _holds_inside(checkpoint: Path) -> list[str]:
    keep = [f"it holds a file '{KEEP}'"] if (checkpoint / KEEP).exists() else []
    return keep + [f"leased by {holder}" for holder in lease_holders(checkpoint)]


def finite_metric(manifest: Manifest, name: str) -> float | None:
    """A metric of a checkpoint; None if it is missing or not finite."""
    value = manifest.metrics.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _best(checkpoints: dict[Path, Manifest], config: CheckpointConfig) -> list[Path]:
    """The best `keep_best`; of equal ones the newer."""
    values = {path: finite_metric(manifest, config.best_metric) for path, manifest in checkpoints.items()}
    measured = {path: value for path, value in values.items() if value is not None}
    sign = 1 if config.best_mode == "min" else -1
    return sorted(measured, key=lambda path: sign * measured[path])[: config.keep_best]


def _best_reason(config: CheckpointConfig) -> str:
    return f"{_one_of(config.keep_best, 'best')} by {config.best_metric}"


def _one_of(number: int, kind: str) -> str:
    return f"the {kind}" if number == 1 else f"one of the {number} {kind}"


# Rotation


@dataclass(frozen=True)
class RotationPlan:
    """What a rotation will do.

    Attributes:
        reasons: every complete checkpoint, the newest first, and why it is kept.
        remove: the oldest first.
        strip: checkpoints whose optimizer shards are removed.
    """

    reasons: dict[Path, list[str]]
    remove: list[Path]
    strip: list[Path]


def rotate(run_dir: Path, max_to_keep: int | None, config: CheckpointConfig, step: int, warn: Warn) -> list[Path]:
    """Remove leftovers of interrupted saves and removals, and the checkpoints that nothing keeps; returns the latter.

    Only the process that saves may call it, and only while no save is in progress, because it removes every `*.tmp`.

    Args:
        run_dir, max_to_keep, config, step: see `reasons_to_keep`.
        warn: called with a sentence for what cannot be removed.
    """
    remove_leftovers(run_dir, warn)
    _, problem = read_best_file(run_dir)
    if problem and max_to_keep is not None:
        warn(f"{run_dir / BEST} {problem}, so no checkpoint is removed; repair or delete it")
    return apply_plan(plan_rotation(run_dir, max_to_keep, config, step), warn)


def plan_rotation(run_dir: Path, max_to_keep: int | None, config: CheckpointConfig, step: int) -> RotationPlan:
    """Decide without touching anything; the arguments are those of `rotate`."""
    reasons = reasons_to_keep(run_dir, max_to_keep, config, step)
    remove = [path for path, why in reversed(reasons.items()) if not why]
    only_best = [_best_reason(config)] if config.drop_optimizer_of_best else None
    strip = [path for path, why in reasons.items() if why and _has_optimizer_to_drop(path, why == only_best)]
    return RotationPlan(reasons, remove, strip)


def apply_plan(plan: RotationPlan, warn: Warn) -> list[Path]:
    """Carry out a plan, with a warning for what fails, and return the checkpoints that were removed."""
    removed = [path for path in plan.remove if _is_free(path, warn) and _attempt(remove_tree, path, warn)]
    for path in plan.strip:  # last: it writes a manifest, and on a full disk there is only now room for it
        _attempt(drop_optimizer, path, warn)
    return removed


def drop_optimizer(checkpoint: Path) -> None:
    """Delete the optimizer's shards; what remains is a complete checkpoint whose manifest says what it lacks.

    The manifest is replaced first. A crash in between leaves files that it does not list, which the next rotation
    deletes.

    Raises:
        OSError: the manifest cannot be replaced or a shard cannot be deleted.
        ValueError: the manifest cannot be read.
    """
    manifest, shards = Manifest.read(checkpoint), shards_of(checkpoint, OPTIMIZER)
    if DROPPED_OPTIMIZER not in manifest.dropped:
        names = {path.name for path in shards}
        files = {name: entry for name, entry in manifest.files.items() if name not in names}
        smaller = replace(manifest, files=files, dropped=(*manifest.dropped, DROPPED_OPTIMIZER))
        replace_file(checkpoint / MANIFEST, [smaller.to_json()])
    for path in shards:
        path.unlink()


def _has_optimizer_to_drop(checkpoint: Path, is_only_best: bool) -> bool:
    try:
        interrupted = DROPPED_OPTIMIZER in Manifest.read(checkpoint).dropped
    except ValueError:  # removed in the meantime
        return False
    return (is_only_best or interrupted) and bool(shards_of(checkpoint, OPTIMIZER))


def _is_free(checkpoint: Path, warn: Warn) -> bool:
    # checked again, because removing the ones before it may have taken minutes
    holds = why_held(checkpoint)
    if holds:
        warn(f"{checkpoint} stays for now, because {' and '.join(holds)}")
    return not holds


def _attempt(action: Callable[[Path], None], path: Path, warn: Warn) -> bool:
    try:
        action(path)
    except (OSError, ValueError) as error:
        warn(f"what is superfluous in {path} could not be removed ({error}); it stays on the disk")
        return False
    return True


# Removal and leftovers


def remove_tree(path: Path) -> None:
    """Rename, then delete, so that a crash in between leaves nothing that looks like a checkpoint."""
    doomed = removal_name(path)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def removal_name(path: Path) -> Path:
    """The name of a directory while it is removed, after deleting what an earlier removal left there."""
    doomed = path.with_name(f"{path.name}{REMOVING}")
    if doomed.exists():
        shutil.rmtree(doomed)
    return doomed


def remove_leftovers(run_dir: Path, warn: Warn) -> None:
    """Remove what interrupted saves and removals left behind; the conditions are those of `rotate`."""
    for path in find_leftovers(run_dir):
        _attempt(shutil.rmtree, path, warn)
    for path in find_temporary_files(run_dir):
        _attempt(Path.unlink, path, warn)


def find_leftovers(run_dir: Path) -> list[Path]:
    """Directories of saves and removals that are in progress or were interrupted."""
    return [path for suffix in (TEMPORARY, REMOVING) for path in sorted(run_dir.glob(f"global_step_*{suffix}"))]


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
    except OSError:  # renamed in the meantime
        return False
    return stat.S_ISREG(state.st_mode) and state.st_mtime < time.time() - DEFAULT_SECONDS
