"""The preparation commands by name, and the parser of their command lines."""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import NoReturn

from verl_ext.data.prepare import chat, gsm8k, problems, smollm2, stdlib
from verl_ext.data.prepare.quickstart import command as quickstart
from verl_ext.data.prepare.vqa import command as vqa
from verl_ext.errors import UserError

# Each module has HELP, EXAMPLE, VERSION (raised when the same arguments would give other files),
# add_arguments(parser) and run(arguments) -> Prepared.
COMMANDS: dict[str, ModuleType] = {
    "chat": chat,
    "stdlib": stdlib,
    "gsm8k": gsm8k,
    "problems": problems,
    "quickstart": quickstart,
    "smollm2": smollm2,
    "vqa": vqa,
}
PROGRAM = "python -m verl_ext.data.prepare"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`.")


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse one preparation command line.

    Args:
        arguments: the command's name and options.

    Returns:
        A namespace with `command`, `output`, `force` and the command's own options.

    Raises:
        UserError: a word is unknown, missing or malformed.
    """
    return _build_parser().parse_args(arguments)


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description="Prepare training data or a small model. Running a finished command again does nothing.",
        epilog=f"example: {PROGRAM} quickstart --output data/quickstart",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=command.HELP, description=command.HELP, epilog=f"example: {PROGRAM} {command.EXAMPLE}"
        )
        subparser.add_argument("--output", required=True, metavar="DIR", help="directory to write into")
        subparser.add_argument("--force", action="store_true", help="prepare again even if nothing changed")
        command.add_arguments(subparser)
    return parser
