"""`python -m verl_ext.checkpoint COMMAND RUN_DIR`: list, verify, export, remove and compare a run's checkpoints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verl_ext.checkpoint.inspection import ls, verify
from verl_ext.checkpoint.prune import prune
from verl_ext.cli import FAILURES, CommandParser, Commands, FloatArg, IntArg, add_command, add_commands, clean_exit
from verl_ext.commands import program
from verl_ext.errors import UserError

SHOWN = 20
"""Number of differences that `diff` lists without --all."""


def build_parser() -> CommandParser:
    """The parser with all commands."""
    parser = CommandParser(
        prog=program("checkpoint"),
        description="List, verify, export, remove and compare the checkpoints of a run.",
        examples=[f"{program('checkpoint')} ls checkpoints/rlvr_coding_model/sft_quickstart"],
        exit_codes={"0": "done", "1": "a checkpoint is damaged, differs or was not removed", **FAILURES},
    )
    commands = add_commands(parser)
    add_ls(commands)
    add_verify(commands)
    add_export(commands)
    add_prune(commands)
    add_diff(commands)
    return parser


def add_run_command(
    commands: Commands, name: str, text: str, run: Callable[[argparse.Namespace], int], example: str, **settings: Any
) -> CommandParser:
    """Add a command with the argument RUN_DIR and return its parser, for further arguments.

    Args:
        run: called with the arguments; returns the exit code.
        example: arguments after RUN_DIR in the example.
    """
    words = f"{program('checkpoint')} {name} checkpoints/rlvr_coding_model/sft_quickstart {example}".rstrip()
    parser = add_command(commands, name, text, examples=[words], **settings)
    parser.usage = f"{parser.prog} RUN_DIR [options]"  # an option that takes several numbers would swallow RUN_DIR
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory that holds global_step_N directories")
    parser.set_defaults(run=run)
    return parser


def add_ls(commands: Commands) -> None:
    """Add `ls`."""
    text = (
        "List the checkpoints of a run, newest first. Shows the size, the number of ranks, whether the checkpoint is "
        "complete, its metrics, and why rotation with the settings in the run's config.yaml keeps or removes it."
    )
    parser = add_run_command(commands, "ls", text, ls, "")
    parser.add_argument("--json", action="store_true", help="print a JSON list for scripts")


def add_verify(commands: Commands) -> None:
    """Add `verify`."""
    text = (
        "Compare every file of a run's checkpoints with its digest. Lists the damaged files, and exits with 1 if a "
        "checkpoint is damaged or incomplete. --step limits the check to some checkpoints."
    )
    exit_codes = {"0": "every checkpoint is complete", "1": "one is damaged or incomplete", **FAILURES}
    parser = add_run_command(commands, "verify", text, verify, "--step 600 750", exit_codes=exit_codes)
    parser.add_argument("--step", type=IntArg(0), nargs="+", help="only the checkpoints of these steps")


def add_export(commands: Commands) -> None:
    """Add `export`."""
    text = (
        "Export a checkpoint's shards as a Hugging Face model. Needs no GPU and no process group, merges LoRA "
        "adapters, and keeps one tensor in memory at a time. Also reads shards that verl itself wrote. RUN_DIR may "
        "also be a checkpoint (a global_step_N directory)."
    )

    def run(arguments: argparse.Namespace) -> int:
        from verl_ext.checkpoint.rebuild import export  # here, because torch takes seconds to import

        return export(arguments)

    parser = add_run_command(commands, "export", text, run, "--step 750 --output models/mine")
    parser.add_argument("--step", type=IntArg(0), help="checkpoint to export (default: the newest complete one)")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="dtype of the weights (default: as in the run's own exports)"
    )
    parser.add_argument(
        "--max-shard-gib", type=FloatArg(), default=5.0, metavar="G", help="maximum size of a file (default: 5)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="a new directory (default: in the checkpoint)")


def add_prune(commands: Commands) -> None:
    """Add `prune`."""
    text = (
        "Remove checkpoints of a run that is not training. Without --step, removes the checkpoints that the rotation "
        "settings in the run's config.yaml do not keep, and the leftovers of interrupted saves and removals. Lists "
        "what will be removed and how much space that frees, and asks for confirmation."
    )
    exit_codes = {"0": "done", "1": "a removal failed or was not confirmed", **FAILURES}
    parser = add_run_command(commands, "prune", text, prune, "--dry-run", exit_codes=exit_codes)
    parser.add_argument("--step", type=IntArg(0), nargs="+", help="remove only the checkpoints of these steps")
    parser.add_argument("--max-to-keep", type=IntArg(), metavar="K", help="override trainer.max_ckpt_to_keep")
    parser.add_argument("--keep-best", type=IntArg(0), metavar="K", help="override trainer.checkpoint.keep_best")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be removed")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def add_diff(commands: Commands) -> None:
    """Add `diff`."""
    text = (
        "Compare two checkpoints tensor by tensor. They may come from different runs and numbers of ranks. Only one "
        "tensor of each is in memory at a time. Exits with 1 if anything differs, like diff."
    )
    exit_codes = {"0": "nothing differs", "1": "a tensor differs", **FAILURES}

    def run(arguments: argparse.Namespace) -> int:
        from verl_ext.checkpoint.compare import diff  # here, because torch takes seconds to import

        return diff(arguments, SHOWN)

    parser = add_run_command(commands, "diff", text, run, "600 750", exit_codes=exit_codes)
    parser.usage = f"{parser.prog} RUN_DIR A B [options]"
    parser.add_argument("pair", nargs=2, metavar="A B", help="steps of the run, or global_step_N directories")
    parser.add_argument("--optimizer", action="store_true", help="compare the optimizer's state too")
    parser.add_argument("--all", action="store_true", help=f"list every difference, not the {SHOWN} largest")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    Raises:
        SystemExit: with code 2 after bad input and 75 after a stop signal, each explained on standard error.
    """
    with clean_exit():
        arguments = build_parser().parse_args(argv)
        try:
            return arguments.run(arguments)
        except OSError as error:
            raise UserError(f"file system error: {error}; make the run's directory accessible") from error


if __name__ == "__main__":
    sys.exit(main())
