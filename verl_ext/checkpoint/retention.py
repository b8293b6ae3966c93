"""Decides which checkpoints to keep, and removes the others. Decisions depend only on files, so restarts are safe.

Does not import torch.
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
from verl_ext.checkpoint.lease import LIFETIME_S, lease_holders
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
from verl_ext.console import Warn
from verl_ext.errors import first_line_of
from verl_ext.files import TEMPORARY, parse_json, replace_file

REMOVING = ".removing"
"""Suffix of a checkpoint that is being removed."""
REPLACED = re.compile(
    rf"(run\.json|config\.yaml|{re.escape(BEST)}|{re.escape(TRACKER)}|{re.escape(MANIFEST)}|lease\..+\.json"
    rf"|(training|validation)_history\.csv|wandb_run_id\.txt|latency_model\.json"
    rf"|node_check\.[0-9a-f]+"
    rf"|(best_model|checkpoint_epoch_\d+)\.pt)"
    rf"{re.escape(TEMPORARY)}"
)
"""Temporary names of files that are replaced atomically in a run directory and its checkpoints."""
EVALUATION = "eval"
REPLACED_BY_EVALUATION = re.compile(rf".+\.(json|jsonl|md|npz|png){re.escape(TEMPORARY)}")
"""The same for files in `eval/`, whose names contain datasets and digests."""


# Reasons to keep a checkpoint


def reasons_to_keep(
    run_dir: Path, max_to_keep: int | None, config: CheckpointConfig, step: int
) -> dict[Path, list[str]]:
    """The reasons to keep each complete checkpoint, newest first; without reasons, it can be removed.

    Args:
        run_dir: directory that holds `global_step_N` directories.
        max_to_keep: number of newest checkpoints to keep; None keeps all.
        config: defines the best checkpoints to keep.
        step: the run's step. Checkpoints of later steps belong to an earlier run in the same directory, before a
            restart with `resume_mode=disable`; they count as older and worse than all others.
    """
    found = complete_checkpoints(run_dir)
    # the sort is stable, so both groups stay in order, newest first
    checkpoints = dict(sorted(found.items(), key=lambda item: (step_of(item[0]) or 0) > step))
    by_verl = [path for path in checkpoints if is_verl_checkpoint(path)]  # never removed, and not counted
    own = [path for path in checkpoints if path not in by_verl]
    chosen, problem = read_best_file(run_dir)
    rules: list[tuple[str, Collection[Path]]] = [
        ("max_ckpt_to_keep is null" if max_to_keep is None else _one_of(max_to_keep, "newest"), own[:max_to_keep]),
        ("verl itself wrote it", by_verl),
        (_best_reason(config), _best(checkpoints, config, step)),
        (f"selected in {BEST}", () if chosen is None else (chosen,)),
        (f"{BEST} {problem}", checkpoints if problem else ()),  # it may name any checkpoint
    ]
    return {path: [why for why, kept in rules if path in kept] + _protections_inside(path) for path in checkpoints}


def read_best_file(run_dir: Path) -> tuple[Path | None, str | None]:
    """The checkpoint that `best_checkpoint.json` names, if any, and the problem if the file cannot be used."""
    try:
        step = parse_json((run_dir / BEST).read_bytes())["step"]
    except FileNotFoundError:
        return None, None
    except KeyError as error:
        return None, f"cannot be read (it lacks {error})"
    except (OSError, ValueError, TypeError) as error:
        return None, f"cannot be read ({first_line_of(error)})"
    if type(step) is not int:
        return None, f"has the step {repr(step)[:40]}, which is not an integer"
    return run_dir / f"global_step_{step}", None


def why_protected(checkpoint: Path) -> list[str]:
    """What protects a checkpoint at any age: a file `keep` in it, a reader's lease, or `best_checkpoint.json`."""
    chosen, problem = read_best_file(checkpoint.parent)
    named = [f"selected in {BEST}"] if checkpoint == chosen else []
    return _protections_inside(checkpoint) + named + ([f"{BEST} {problem}"] if problem else [])


def _protections_inside(checkpoint: Path) -> list[str]:
    keep = [f"protected by its `{KEEP}` file"] if (checkpoint / KEEP).exists() else []
    return keep + [f"leased by {holder}" for holder in lease_holders(checkpoint)]


def finite_metric(manifest: Manifest, name: str) -> float | None:
    """A metric of a checkpoint; None if it is missing or not finite."""
    value = manifest.metrics.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _best(checkpoints: dict[Path, Manifest], config: CheckpointConfig, step: int) -> list[Path]:
    """The `keep_best` best checkpoints; the newer one wins a tie, and those of an earlier run come last."""
    values = {path: finite_metric(manifest, config.best_metric) for path, manifest in checkpoints.items()}
    measured = {path: value for path, value in values.items() if value is not None}
    sign = 1 if config.best_mode == "min" else -1
    return sorted(measured, key=lambda path: ((step_of(path) or 0) > step, sign * measured[path]))[: config.keep_best]


def _best_reason(config: CheckpointConfig) -> str:
    return f"{_one_of(config.keep_best, 'best')} by {config.best_metric}"


def _one_of(number: int, kind: str) -> str:
    return f"the {kind}" if number == 1 else f"one of the {number} {kind}"


# Rotation


@dataclass(frozen=True)
class RotationPlan:
    """What a rotation will do.

    Attributes:
        reasons: reasons to keep each complete checkpoint, newest first.
        remove: checkpoints to remove, oldest first.
        strip: checkpoints whose optimizer shards to remove.
    """

    reasons: dict[Path, list[str]]
    remove: list[Path]
    strip: list[Path]


def rotate(run_dir: Path, max_to_keep: int | None, config: CheckpointConfig, step: int, warn: Warn) -> list[Path]:
    """Remove leftovers and the checkpoints that there is no reason to keep; return the removed checkpoints.

    Only the process that saves may call this, and only while no save is in progress, because it removes every `*.tmp`.

    Args:
        run_dir, max_to_keep, config, step: see `reasons_to_keep`.
        warn: called with a message for each failed removal.
    """
    remove_leftovers(run_dir, warn)
    _, problem = read_best_file(run_dir)
    if problem and max_to_keep is not None:
        warn(f"{run_dir / BEST} {problem}, so no checkpoint is removed; repair or delete it")
    return apply_plan(plan_rotation(run_dir, max_to_keep, config, step), warn)


def plan_rotation(run_dir: Path, max_to_keep: int | None, config: CheckpointConfig, step: int) -> RotationPlan:
    """Decide what `rotate` would do, without changing anything; takes the arguments of `rotate`."""
    reasons = reasons_to_keep(run_dir, max_to_keep, config, step)
    remove = [path for path, why in reversed(reasons.items()) if not why]
    only_best = [_best_reason(config)] if config.drop_optimizer_of_best else None
    strip = [path for path, why in reasons.items() if why and _has_optimizer_to_drop(path, why == only_best)]
    return RotationPlan(reasons, remove, strip)


def apply_plan(plan: RotationPlan, warn: Warn) -> list[Path]:
    """Carry out a plan, warn of failures, and return the removed checkpoints."""
    removed = [path for path in plan.remove if _is_free(path, warn) and _try_or_warn(remove_tree, path, warn)]
    for path in plan.strip:  # last, because it writes a manifest, which a full disk has room for only now
        _try_or_warn(drop_optimizer, path, warn)
    return removed


def drop_optimizer(checkpoint: Path) -> None:
    """Delete the optimizer shards; the checkpoint stays complete, and its manifest says what was dropped.

    The manifest is replaced first. A crash in between leaves unlisted files, which the next rotation deletes.

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
    # check again, because the removals before this one may have taken minutes
    reasons = why_protected(checkpoint)
    if reasons:
        warn(f"{checkpoint} is kept for now, because {' and '.join(reasons)}")
    return not reasons


def _try_or_warn(action: Callable[[Path], None], path: Path, warn: Warn) -> bool:
    try:
        action(path)
    except (OSError, ValueError) as error:
        warn(f"{path} could not be cleaned up ({error}); check its permissions; the next rotation retries")
        return False
    return True


# Removal and leftovers


def remove_tree(path: Path) -> None:
    """Rename and then delete, so that a crash in between leaves nothing that looks like a checkpoint."""
    doomed = removal_name(path)
    os.rename(path, doomed)
    _delete(doomed)


def removal_name(path: Path) -> Path:
    """The name of a directory during its removal; deletes the leftovers of an earlier removal there."""
    doomed = path.with_name(f"{path.name}{REMOVING}")
    if os.path.lexists(doomed):
        _delete(doomed)
    return doomed


def _delete(path: Path) -> None:
    """Delete a directory, or a link to one.

    The target of a link stays: a user has moved it out of the run directory, or it belongs to another run.
    """
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def remove_leftovers(run_dir: Path, warn: Warn) -> None:
    """Remove leftovers of interrupted saves and removals, under the conditions of `rotate`."""
    for path in find_leftovers(run_dir):
        _try_or_warn(_delete, path, warn)
    for path in find_temporary_files(run_dir):
        _try_or_warn(Path.unlink, path, warn)


def find_leftovers(run_dir: Path) -> list[Path]:
    """Directories of saves and removals that are in progress or were interrupted."""
    return [path for suffix in (TEMPORARY, REMOVING) for path in sorted(run_dir.glob(f"global_step_*{suffix}"))]


def find_temporary_files(run_dir: Path) -> list[Path]:
    """Temporary files of processes that were killed before the rename. Skips recent files of live processes."""
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
    return stat.S_ISREG(state.st_mode) and state.st_mtime < time.time() - LIFETIME_S
