"""Preparation of training data and small models: `python -m verl_ext.data.prepare COMMAND ... --output DIR`.

The launcher runs a recipe's preparation commands before training starts, given as on the command line:

    if not is_prepared(["quickstart", "--output", "data/quickstart"]):
        prepare(["quickstart", "--output", "data/quickstart"])
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from verl_ext.cli import CommandParser, add_command, add_commands
from verl_ext.commands import program
from verl_ext.console import print_line, print_summary
from verl_ext.data.prepare import chat, gsm8k, problems, prompts, quickstart, reasoning_gym, smollm2, stdlib, vqa
from verl_ext.data.prepare.command import (
    PrepareCommand,
    changed_inputs,
    input_states,
    make_directory,
    remove_stamp,
    write_stamp,
)

PROGRAM = program("prepare")
COMMANDS: dict[str, PrepareCommand] = {
    module.COMMAND.name: module.COMMAND
    for module in (chat, stdlib, gsm8k, problems, prompts, reasoning_gym, quickstart, smollm2, vqa)
}


def build_parser(words: Sequence[str] = tuple(COMMANDS)) -> CommandParser:
    """Build the command line parser.

    Args:
        words: the command line; only the commands in it get their options, which may be slow to build.
    """
    parser = CommandParser(
        prog=PROGRAM,
        description="Prepare training data or a small model. Commands whose output is up to date do nothing.",
        examples=[f"{PROGRAM} quickstart --output data/quickstart"],
    )
    commands = add_commands(parser)
    for name, command in COMMANDS.items():
        subparser = add_command(commands, name, command.help, examples=[f"{PROGRAM} {command.example}"])
        if name in words:
            subparser.add_argument("--output", required=True, metavar="DIR", help="output directory")
            subparser.add_argument("--force", action="store_true", help="prepare again even if nothing changed")
            command.add_arguments(subparser)
    return parser


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse a preparation command line: the command's name and options.

    Returns:
        A namespace with `command`, `output`, `force` and the command's own options.

    Raises:
        UserError: a word is unknown, missing or malformed.
    """
    return build_parser(words).parse_args(words)


def is_prepared(words: Sequence[str]) -> bool:
    """Whether an earlier run with the same arguments finished, its files still exist, and its inputs are unchanged.

    Imports nothing heavy, so that it can run before every training.

    Raises:
        UserError: the words do not parse, or an input cannot be read.
    """
    arguments = parse_arguments(words)
    return changed_inputs(COMMANDS[arguments.command], arguments) == []


def prepare(words: Sequence[str], *, is_typed: bool = False) -> None:
    """Run one preparation command, unless its output is up to date, and print a summary.

    Args:
        words: the command's name and options, as on the command line; `--force` always runs the command.
        is_typed: whether a user typed the command, so that the summary names the next command.

    Raises:
        UserError: the words do not parse, or an input is missing or malformed.
    """
    arguments = parse_arguments(words)
    command, output = COMMANDS[arguments.command], Path(arguments.output)
    changed = None if arguments.force else changed_inputs(command, arguments)
    if changed == []:
        print_line(f"Nothing to do: {output} is already prepared; --force prepares it again.")
        return
    if changed:
        print_line(f"{', '.join(changed)} changed since {output} was prepared; preparing it again.")
    is_new = not output.exists()
    make_directory(output)  # refuse an output that is not writable before the work
    remove_stamp(output)
    try:
        inputs = input_states(arguments)  # before the run, so that the next run detects changes during this one
        result = command.run(arguments)
    except BaseException:
        if is_new:
            with suppress(OSError):  # it is not empty
                output.rmdir()
        raise
    write_stamp(command, arguments, result, inputs)
    entries = dict.fromkeys(name.partition("/")[0] + "/" * ("/" in name) for name in result.files)
    rows = {**result.counts, "files": ", ".join(entries)}
    next_words = command.next_words(str(output.absolute()), result) if is_typed else []
    print_summary(f"Prepared: {arguments.output}", rows, next_words)
