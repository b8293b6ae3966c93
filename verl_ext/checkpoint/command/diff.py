"""`diff`: what differs between two checkpoints, tensor by tensor."""

from __future__ import annotations

import argparse
from pathlib import Path

from verl_ext.checkpoint.command.run_directory import add_run_command, require_steps
from verl_ext.checkpoint.layout import step_of
from verl_ext.cli import FAILURES, Commands
from verl_ext.console import print_line, progress_bar, text_table
from verl_ext.errors import UserError

TEXT = (
    "Compare two checkpoints tensor by tensor. They may be of different runs and numbers of ranks; one tensor of "
    "each is in memory at a time. Exits with 1 if anything differs, as diff does."
)
SHOWN = 20
EXIT_CODES = {"0": "nothing differs", "1": "a tensor differs", **FAILURES}


def register(commands: Commands) -> None:
    """Add the command."""
    parser = add_run_command(commands, "diff", TEXT, run, more="600 750", exit_codes=EXIT_CODES)
    parser.usage = f"{parser.prog} RUN_DIR A B [options]"
    parser.add_argument("pair", nargs=2, metavar="A B", help="steps of the run, or global_step_N directories")
    parser.add_argument("--optimizer", action="store_true", help="compare the optimizer's state too")
    parser.add_argument("--all", action="store_true", help=f"list every difference, not the {SHOWN} largest")


def run(arguments: argparse.Namespace) -> int:
    """Print the differences, the largest first."""
    first, second = (_resolve(arguments.run_dir, word) for word in arguments.pair)
    from verl_ext.checkpoint.compare import compare, num_bytes  # here, as torch takes seconds to import

    kinds = ("model", "optim") if arguments.optimizer else ("model",)
    total = num_bytes(first, kinds)
    with progress_bar(total=total, desc="comparing", unit="B") as bar:
        differences = list(compare(first, second, kinds, bar.update))
    unequal = sorted((entry for entry in differences if not entry.is_equal), key=lambda entry: -entry.size)
    shown = unequal if arguments.all else unequal[:SHOWN]
    if shown:
        header = ("tensor", "largest |A-B|", "relative", "what")
        print_line(text_table([header, *((e.name, f"{e.largest:.3g}", f"{e.relative:.3g}", e.what) for e in shown)]))
    if len(shown) < len(unequal):
        print_line(f"... and {len(unequal) - len(shown)} more; --all lists them")
    print_line(f"{len(differences) - len(unequal)} of {len(differences)} tensors are equal bit for bit")
    return 1 if unequal else 0


def _resolve(run_dir: Path, word: str) -> Path:
    if word.isdecimal():
        if not run_dir.is_dir():
            raise UserError(f"{run_dir} is not a directory; name the directory of a run")
        return require_steps(run_dir, [int(word)])[0]
    path = Path(word)
    if not path.is_dir() or step_of(path.resolve()) is None:
        raise UserError(f"'{word}' is neither a step of {run_dir} nor a global_step_N directory; `ls` shows the steps")
    return path
