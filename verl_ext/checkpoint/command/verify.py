"""`verify`: whether the files of checkpoints are still what was saved."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.checkpoint.command.run_directory import add_run_command, require_run_dir, require_steps
from verl_ext.checkpoint.layout import Manifest, list_steps, read_all_complete, what_is_wrong
from verl_ext.checkpoint.stock import is_stock
from verl_ext.checkpoint.verify import damaged_files
from verl_ext.cli import FAILURES, Commands, IntArg
from verl_ext.console import print_line, print_summary, progress_bar
from verl_ext.errors import UserError
from verl_ext.files import format_bytes

if TYPE_CHECKING:
    from tqdm import tqdm

TEXT = (
    "Compare every file of a run's checkpoints with its digest. Reads all of them or those of the steps named, lists "
    "the damaged files, and exits with 1 if a checkpoint is damaged or incomplete."
)
EXIT_CODES = {"0": "every checkpoint is complete", "1": "one is damaged or incomplete", **FAILURES}


def register(commands: Commands) -> None:
    """Add the command."""
    parser = add_run_command(commands, "verify", TEXT, run, more="--step 600 750", exit_codes=EXIT_CODES)
    parser.add_argument("--step", type=IntArg(0), nargs="+", help="only the checkpoints of these steps")


def run(arguments: argparse.Namespace) -> int:
    """Read the checkpoints and print a line for each."""
    run_dir = require_run_dir(arguments.run_dir)
    checkpoints = require_steps(run_dir, arguments.step) if arguments.step else list_steps(run_dir)
    if not checkpoints:
        raise UserError(f"{run_dir} holds only what saves and removals left behind; there is nothing to verify")
    complete = read_all_complete(run_dir)
    num_bytes = sum(complete[path].num_bytes for path in checkpoints if path in complete)
    num_read, num_sound = len(checkpoints), 0
    with progress_bar(total=num_bytes, desc="reading", unit="B") as bar:
        for path in checkpoints:
            manifest, problems = examine(path, bar.update)
            if problems and not path.exists():  # a training that goes on has rotated
                _tell_above(bar, f"{path.name}: removed while it was read")
                num_read -= 1
                continue
            num_sound += not problems
            lines = [f"{path.name}: {_verdict(path, manifest, problems)}", *(f"  {line}" for line in problems)]
            _tell_above(bar, "\n".join(lines))
    print_summary(f"Verified: {num_sound} of {num_read} checkpoints are whole")
    return 0 if num_sound == num_read else 1


def examine(checkpoint: Path, progress: Callable[[int], None]) -> tuple[Manifest | None, list[str]]:
    """The manifest of a checkpoint and what is wrong with it, a line for each damaged file; none when it is sound."""
    try:
        manifest = Manifest.read(checkpoint)
        damaged = damaged_files(checkpoint, progress=progress)
    except ValueError as error:
        return None, [str(error)]
    problem = what_is_wrong(checkpoint)  # what digests do not show: the manifest of another step
    return manifest, [f"{name} {what}" for name, what in damaged.items()] or ([problem] if problem else [])


def _tell_above(bar: tqdm[Any], text: str) -> None:
    with bar.external_write_mode():
        print_line(text)


def _verdict(checkpoint: Path, manifest: Manifest | None, problems: list[str]) -> str:
    if problems or manifest is None:
        return "damaged or incomplete"
    whole = "verl keeps no digests, but every checksum is right" if is_stock(checkpoint) else "every digest is right"
    return f"complete, {len(manifest.files)} files, {format_bytes(manifest.num_bytes)}, {whole}"
