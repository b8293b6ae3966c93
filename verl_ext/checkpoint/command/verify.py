"""`verify`: whether the files of checkpoints are still what was saved."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from verl_ext.checkpoint.command.run_directory import Commands, add_command, require_run_dir, require_steps
from verl_ext.checkpoint.command.text import human_bytes
from verl_ext.checkpoint.layout import Manifest, list_steps, what_is_wrong
from verl_ext.checkpoint.stock import is_stock
from verl_ext.checkpoint.verify import damaged_files
from verl_ext.errors import UserError

TEXT = (
    "Compare every file of a run's checkpoints with its digest. Reads all of them or those of the steps named, lists "
    "the damaged files, and exits with 1 if a checkpoint is damaged or incomplete."
)


def register(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "verify", TEXT, run)
    parser.add_argument("--step", type=int, nargs="+", metavar="N", help="only the checkpoints of these steps")


def run(arguments: argparse.Namespace) -> int:
    """Read the checkpoints and print a line for each."""
    run_dir = require_run_dir(arguments.run_dir)
    checkpoints = require_steps(run_dir, arguments.step) if arguments.step else list_steps(run_dir)
    if not checkpoints:
        raise UserError(f"{run_dir} holds only what saves and removals left behind; there is nothing to verify")
    num_bytes = sum(Manifest.read(path).num_bytes for path in checkpoints if what_is_wrong(path) is None)
    is_sound = True
    # disable=None shows the bar on a terminal alone
    with tqdm(total=num_bytes, unit="B", unit_scale=True, unit_divisor=1024, disable=None) as bar:
        for path in checkpoints:
            problems = find_problems(path, bar.update)
            if problems and not path.exists():  # a training that goes on has rotated
                bar.write(f"{path.name}: removed while it was read")
                continue
            is_sound = is_sound and not problems
            bar.write("\n".join([f"{path.name}: {_verdict(path, problems)}", *(f"  {line}" for line in problems)]))
    return 0 if is_sound else 1


def find_problems(checkpoint: Path, progress: Callable[[int], None]) -> list[str]:
    """What is wrong with a checkpoint, a line for each damaged file; empty when it is sound."""
    try:
        damaged = damaged_files(checkpoint, progress=progress)
    except ValueError as error:
        return [str(error)]
    problem = what_is_wrong(checkpoint)  # what digests do not show: the manifest of another step
    return [f"{name} {what}" for name, what in damaged.items()] or ([problem] if problem else [])


def _verdict(checkpoint: Path, problems: list[str]) -> str:
    if problems:
        return "damaged or incomplete"
    manifest = Manifest.read(checkpoint)
    whole = "verl keeps no digests, but every checksum is right" if is_stock(checkpoint) else "every digest is right"
    return f"complete, {len(manifest.files)} files, {human_bytes(manifest.num_bytes)}, {whole}"
