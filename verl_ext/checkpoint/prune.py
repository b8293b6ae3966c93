"""`prune`: removes checkpoints by the rotation rules or by step."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from verl_ext.checkpoint.inspection import (
    current_step,
    newest_resumable,
    read_retention,
    require_run_dir,
    require_steps,
    size_on_disk,
)
from verl_ext.checkpoint.lease import lease_holders
from verl_ext.checkpoint.manifest import BEST, KEEP, OPTIMIZER, list_checkpoints, shards_of
from verl_ext.checkpoint.retention import (
    RotationPlan,
    apply_plan,
    find_leftovers,
    find_temporary_files,
    plan_rotation,
    read_best_file,
    remove_leftovers,
)
from verl_ext.console import print_line, print_summary, warn
from verl_ext.errors import UserError
from verl_ext.files import format_bytes, hold_run_lock, is_run_locked


def prune(arguments: argparse.Namespace) -> int:
    """Print what will be removed, ask for confirmation, and remove it. Return 1 if anything remains."""
    run_dir = require_run_dir(arguments.run_dir)
    lock = nullcontext(not is_run_locked(run_dir)) if arguments.dry_run else hold_run_lock(run_dir)
    with lock as is_alone:
        plan = _plan(run_dir, arguments)
        leftovers = [*find_leftovers(run_dir), *find_temporary_files(run_dir)] if arguments.step is None else []
        if not is_alone:  # without a lock, an apparent leftover may be a save in progress
            leftovers = []
            if arguments.dry_run:
                print_line(f"{run_dir} is in use; prune requires that the run has ended. Leftovers are not listed.")
        if not plan.remove and not plan.strip and not leftovers:
            print_line("Nothing to remove; `ls` shows why each checkpoint is kept.")
            return 0
        print_line(_describe(plan, leftovers, run_dir))
        if arguments.dry_run:
            return 0
        if not arguments.yes and not _confirmed():
            print_line("Nothing was removed.")
            return 1
        return _remove(plan, leftovers, run_dir)


def _plan(run_dir: Path, arguments: argparse.Namespace) -> RotationPlan:
    if arguments.step is not None:
        if arguments.max_to_keep is not None or arguments.keep_best is not None:
            raise UserError("--step cannot be combined with --max-to-keep or --keep-best; remove one of them")
        chosen = require_steps(run_dir, arguments.step)
        _require_free(run_dir, chosen)
        return RotationPlan({}, remove=chosen, strip=[])
    max_to_keep, config = read_retention(run_dir)
    if arguments.max_to_keep is not None:
        max_to_keep = arguments.max_to_keep
    if arguments.keep_best is not None:
        config = replace(config, keep_best=arguments.keep_best)
    return plan_rotation(run_dir, max_to_keep, config, current_step(run_dir))


def _require_free(run_dir: Path, checkpoints: list[Path]) -> None:
    """Refuse the whole request if one of the checkpoints is protected.

    Raises:
        UserError: the message says which checkpoint is protected, by what, and how to release it.
    """
    newest = newest_resumable(run_dir)
    chosen, problem = read_best_file(run_dir)
    if problem:
        raise UserError(f"{run_dir / BEST} {problem}, so it may name any checkpoint; repair or delete it")
    for path in checkpoints:
        if (path / KEEP).exists():
            raise UserError(f"{path.name} is protected by its `{KEEP}` file; delete {path / KEEP} first")
        if holders := lease_holders(path):
            raise UserError(f"{path.name} is being read by {', '.join(holders)}; wait for it or stop it")
        if path == chosen:
            raise UserError(f"{run_dir / BEST} names {path.name}; select another checkpoint in it, or delete it")
        if path == newest:
            raise UserError(
                f"the run would resume from {path.name}; save a newer checkpoint first, "
                f"or delete {run_dir} to give up the run"
            )


def _describe(plan: RotationPlan, leftovers: list[Path], run_dir: Path) -> str:
    sizes = {f"{path.relative_to(run_dir)} (leftover)": size_on_disk(path) for path in leftovers}
    sizes |= {path.name: size_on_disk(path) for path in plan.remove}
    for path in plan.strip:
        sizes[f"{path.name} (optimizer only)"] = sum(map(size_on_disk, shards_of(path, OPTIMIZER)))
    lines = [f"  {name}: {format_bytes(size)}" for name, size in sizes.items()]
    return "\n".join(["To be removed:", *lines, f"This frees {format_bytes(sum(sizes.values()))}."])


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        raise UserError("prune needs confirmation, but standard input is not a terminal; pass --yes to confirm")
    print_line("Remove them? [y/N] ", end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _remove(plan: RotationPlan, leftovers: list[Path], run_dir: Path) -> int:
    problems: list[str] = []
    if leftovers:
        remove_leftovers(run_dir, problems.append)
    removed = apply_plan(plan, problems.append)
    for problem in problems:
        warn(problem)
    remaining = ", ".join(path.name for path in list_checkpoints(run_dir)) or "none"
    also = f" and {len(leftovers)} leftover{'s' * (len(leftovers) > 1)}" if leftovers else ""
    print_summary(f"Removed: {len(removed)} of {len(plan.remove)} checkpoints{also}", {"remaining": remaining})
    return 1 if problems else 0
