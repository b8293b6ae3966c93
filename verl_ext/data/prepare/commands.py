"""The preparation commands by name, and the parser of their command lines."""

from __future__ import annotations

import argparse
from types import ModuleType

from verl_ext.cli import CommandParser, add_command, add_commands
from verl_ext.commands import program
from verl_ext.data.prepare import chat, gsm8k, problems, prompts, smollm2, stdlib
from verl_ext.data.prepare.quickstart import command as quickstart
from verl_ext.data.prepare.vqa import command as vqa

# Each module has HELP, EXAMPLE, NEXT (what to type afterwards, by a name of `verl_ext.commands`), VERSION (raised when
# the same arguments would give other files), add_arguments(parser) and run(arguments) -> Prepared.
COMMANDS: dict[str, ModuleType] = {
    "chat": chat,
    "stdlib": stdlib,
    "gsm8k": gsm8k,
    "problems": problems,
    "prompts": prompts,
    "quickstart": quickstart,
    "smollm2": smollm2,
    "vqa": vqa,
}
PROGRAM = program("prepare")


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse one preparation command line.

    Args:
        arguments: the command's name and options.

    Returns:
        A namespace with `command`, `output`, `force` and the command's own options.

    Raises:
        UserError: a word is unknown, missing or malformed.
    """
    return build_parser().parse_args(arguments)


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog=PROGRAM,
        description="Prepare training data or a small model. Running a finished command again does nothing.",
        examples=[f"{PROGRAM} quickstart --output data/quickstart"],
    )
    commands = add_commands(parser)
    for name, command in COMMANDS.items():
        subparser = add_command(commands, name, command.HELP, examples=[f"{PROGRAM} {command.EXAMPLE}"])
        subparser.add_argument("--output", required=True, metavar="DIR", help="directory to write into")
        subparser.add_argument("--force", action="store_true", help="prepare again even if nothing changed")
        command.add_arguments(subparser)
    return parser
