"""`prune`: removes checkpoints by hand, by the rules of rotation or by their steps."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from verl_ext.checkpoint.command.held import require_free
from verl_ext.checkpoint.command.run_directory import add_run_command, require_run_dir, require_steps
from verl_ext.checkpoint.command.settings import read_retention
from verl_ext.checkpoint.command.survey import current_step, size_on_disk
from verl_ext.checkpoint.layout import list_steps
from verl_ext.checkpoint.rotation import (
    OPTIMIZER_FILES,
    Plan,
    carry_out,
    find_leftovers,
    find_temporary_files,
    plan_rotation,
    remove_leftovers,
)
from verl_ext.cli import FAILURES, Commands, IntArg
from verl_ext.console import print_line, print_summary, warn
from verl_ext.errors import UserError
from verl_ext.files import format_bytes, hold_run_lock

TEXT = (
    "Remove checkpoints of a run that is not training. Without --step, removes the checkpoints that the rotation "
    "settings in the run's config.yaml do not keep, and what interrupted saves and removals left behind. Lists what "
    "will be removed and how much space that frees, and asks for confirmation."
)
EXIT_CODES = {"0": "done", "1": "something that was to go is still there", **FAILURES}


def register(commands: Commands) -> None:
    """Add the command."""
    parser = add_run_command(commands, "prune", TEXT, run, more="--dry-run", exit_codes=EXIT_CODES)
    parser.add_argument("--step", type=IntArg(0), nargs="+", help="the checkpoints of these steps, no others")
    parser.add_argument("--max-to-keep", type=IntArg(), metavar="K", help="in place of trainer.max_ckpt_to_keep")
    parser.add_argument("--keep-best", type=IntArg(0), metavar="K", help="in place of trainer.checkpoint.keep_best")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(arguments: argparse.Namespace) -> int:
    """Say what goes, ask, remove; returns 1 if something that was to go is still there."""
    run_dir = require_run_dir(arguments.run_dir)
    with nullcontext(True) if arguments.dry_run else hold_run_lock(run_dir) as is_alone:
        plan = _plan(run_dir, arguments)
        leftovers = [*find_leftovers(run_dir), *find_temporary_files(run_dir)] if arguments.step is None else []
        if not is_alone:  # without locks, what looks like a leftover may be a save under way
            leftovers = []
        if not plan.remove and not plan.strip and not leftovers:
            print_line("Nothing to remove; `ls` says what keeps each checkpoint.")
            return 0
        print_line(_describe(plan, leftovers, run_dir))
        if arguments.dry_run:
            return 0
        if not arguments.yes and not _confirmed():
            print_line("Nothing was removed.")
            return 1
        return _remove(plan, leftovers, run_dir)


def _plan(run_dir: Path, arguments: argparse.Namespace) -> Plan:
    options = {"max_to_keep": arguments.max_to_keep, "keep_best": arguments.keep_best}
    given = {name: value for name, value in options.items() if value is not None}
    if arguments.step is None:
        return plan_rotation(run_dir, replace(read_retention(run_dir), **given), current_step(run_dir))
    if given:
        raise UserError("--step says by itself what goes; leave out --max-to-keep and --keep-best, or --step")
    chosen = require_steps(run_dir, arguments.step)
    require_free(run_dir, chosen)
    return Plan({}, remove=chosen, strip=[])


def _describe(plan: Plan, leftovers: list[Path], run_dir: Path) -> str:
    sizes = {f"{path.relative_to(run_dir)}, left by an interruption": size_on_disk(path) for path in leftovers}
    sizes |= {path.name: size_on_disk(path) for path in plan.remove}
    for path in plan.strip:
        sizes[f"{path.name}, its optimizer alone"] = sum(map(size_on_disk, path.glob(OPTIMIZER_FILES)))
    lines = [f"  {name}: {format_bytes(size)}" for name, size in sizes.items()]
    return "\n".join(["To be removed:", *lines, f"This frees {format_bytes(sum(sizes.values()))}."])


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        raise UserError("nobody can be asked, since standard input is no terminal; say --yes to remove them")
    print_line("Remove them? [y/N] ", end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _remove(plan: Plan, leftovers: list[Path], run_dir: Path) -> int:
    problems: list[str] = []
    if leftovers:
        remove_leftovers(run_dir, problems.append)
    removed = carry_out(plan, problems.append)
    for problem in problems:
        warn(problem)
    left = ", ".join(path.name for path in list_steps(run_dir))
    also = f" and {len(leftovers)} leftover{'s' * (len(leftovers) > 1)}" if leftovers else ""
    print_summary(f"Removed: {len(removed)} of {len(plan.remove)} checkpoints{also}", {"left": left or "none"})
    return 1 if problems else 0
