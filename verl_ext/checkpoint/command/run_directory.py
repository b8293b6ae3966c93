"""What every command has in common: it is about one run's directory."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_ext.checkpoint.layout import list_steps, step_of
from verl_ext.checkpoint.resume import find_checkpoint
from verl_ext.checkpoint.rotation import find_leftovers
from verl_ext.cli import CommandParser, Commands, add_command
from verl_ext.commands import program
from verl_ext.errors import UserError


def add_run_command(
    commands: Commands, name: str, text: str, run: Callable[[argparse.Namespace], int], *, more: str, **settings: Any
) -> CommandParser:
    """Add a command with the argument RUN_DIR.

    Args:
        commands: where to add it.
        name: the word that the user types.
        text: what it does, in a sentence or two; the first sentence is its line in the list of commands.
        run: called with the arguments, returns the exit code.
        more: what the example has behind the command and RUN_DIR.
        settings: others of the parser.

    Returns:
        Its parser, for further arguments.
    """
    example = f"{program('checkpoint')} {name} checkpoints/rlvr_coding_model/sft_quickstart {more}".rstrip()
    parser = add_command(commands, name, text, examples=[example], **settings)
    parser.usage = f"{parser.prog} RUN_DIR [options]"  # an option that takes several numbers would swallow RUN_DIR
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory that holds global_step_N directories")
    parser.set_defaults(run=run)
    return parser


def require_run_dir(path: Path) -> Path:
    """Return a directory in which there is a checkpoint, or what is left of one.

    Raises:
        UserError: there is none.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; name the directory of a run")
    if step_of(path.resolve()) is not None:
        raise UserError(f"{path} is a checkpoint; name the directory of its run, {path.resolve().parent}")
    if not list_steps(path) and not find_leftovers(path):
        raise UserError(f"{path} holds no checkpoint; name a directory that holds global_step_N directories")
    return path


def require_steps(run_dir: Path, steps: list[int]) -> list[Path]:
    """The directories of these steps, complete or not, each once.

    Raises:
        UserError: one of them does not exist.
    """
    known = {step_of(path): path for path in list_steps(run_dir)}
    missing = [str(step) for step in steps if step not in known]
    if missing:
        there = ", ".join(map(str, known)) or "none"
        raise UserError(f"{run_dir} has no checkpoint of step {', '.join(missing)}; there are {there}")
    return [known[step] for step in dict.fromkeys(steps)]


def newest_resumable(run_dir: Path) -> Path | None:
    """The checkpoint that the next start would go on from, None where there is none."""
    try:
        return find_checkpoint(run_dir, "auto", None, warn=lambda message: None)
    except UserError:  # checkpoints are there, but none is complete
        return None
