"""`python -m verl_ext.checkpoint COMMAND RUN_DIR`: look at a run's checkpoints, check, export, remove, compare them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl_ext.checkpoint.command import diff, export, ls, prune, verify
from verl_ext.cli import FAILURES, CommandParser, add_commands, clean_exit
from verl_ext.commands import program
from verl_ext.errors import UserError

COMMANDS = (ls, verify, export, prune, diff)
"""Each has `register(commands)`, which adds its parser and names the function to run."""


def build_parser() -> CommandParser:
    """Options and help of every command."""
    parser = CommandParser(
        prog=program("checkpoint"),
        description="Look at the checkpoints of a run, check them, export, remove and compare them.",
        examples=[f"{program('checkpoint')} ls checkpoints/rlvr_coding_model/sft_quickstart"],
        exit_codes={"0": "done", "1": "something is damaged, differs or was not removed", **FAILURES},
    )
    commands = add_commands(parser)
    for command in COMMANDS:
        command.register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        The exit code.

    Raises:
        SystemExit: with code 2 after bad input and 75 after a stop, each explained on standard error.
    """
    with clean_exit():
        arguments = build_parser().parse_args(argv)
        try:
            return arguments.run(arguments)
        except OSError as error:
            raise UserError(f"the file system refused: {error}; make the run's directory accessible") from error


if __name__ == "__main__":
    sys.exit(main())
