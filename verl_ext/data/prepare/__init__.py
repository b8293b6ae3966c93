"""Preparation of training data and small models: `python -m verl_ext.data.prepare COMMAND ... --output DIR`.

The launcher prepares what a recipe names before training starts, with the words of the command line:

    if not is_prepared(["quickstart", "--output", "data/quickstart"]):
        prepare(["quickstart", "--output", "data/quickstart"])
"""

from __future__ import annotations

from pathlib import Path

from verl_ext.data.prepare import stamp
from verl_ext.data.prepare.commands import COMMANDS, parse_arguments
from verl_ext.data.prepare.files import make_directory

__all__ = ["is_prepared", "prepare"]


def is_prepared(arguments: list[str]) -> bool:
    """Tell whether an earlier run with the same arguments finished and its files are still there.

    Imports nothing heavy, so it may run before every training.

    Args:
        arguments: the command's name and options, as on the command line.

    Raises:
        UserError: the arguments do not parse.
    """
    parsed = parse_arguments(arguments)
    return stamp.is_current(parsed, COMMANDS[parsed.command].VERSION)


def prepare(arguments: list[str]) -> None:
    """Run one preparation command, unless its output is already there, and print what it made.

    Args:
        arguments: the command's name and options, as on the command line; `--force` runs it in any case.

    Raises:
        UserError: the arguments do not parse, or an input is missing or malformed.
    """
    parsed = parse_arguments(arguments)
    command = COMMANDS[parsed.command]
    if not parsed.force and stamp.is_current(parsed, command.VERSION):
        print(f"nothing to do: {parsed.output} is already prepared (--force prepares it again)")
        return
    # Before the work, so that an output that cannot be written to does not show itself only after it.
    make_directory(Path(parsed.output))
    stamp.remove(parsed.output)
    prepared = command.run(parsed)
    stamp.write(parsed, command.VERSION, prepared)
    for name, count in prepared.counts.items():
        print(f"{name:>28}  {count}")
    print(f"wrote {', '.join(prepared.files)} in {parsed.output}")
