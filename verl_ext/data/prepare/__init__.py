"""Preparation of training data and small models: `python -m verl_ext.data.prepare COMMAND ... --output DIR`.

The launcher prepares what a recipe names before training starts, with the words of the command line:

    if not is_prepared(["quickstart", "--output", "data/quickstart"]):
        prepare(["quickstart", "--output", "data/quickstart"])
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from verl_ext.commands import typed_command
from verl_ext.console import print_line, print_summary
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


def prepare(arguments: list[str], *, is_typed: bool = False) -> None:
    """Run one preparation command, unless its output is already there, and print what it made.

    Args:
        arguments: the command's name and options, as on the command line; `--force` runs it in any case.
        is_typed: whether somebody typed it and will want to know what comes next.

    Raises:
        UserError: the arguments do not parse, or an input is missing or malformed.
    """
    parsed = parse_arguments(arguments)
    command = COMMANDS[parsed.command]
    changed = None if parsed.force else stamp.changed_inputs(parsed, command.VERSION)
    if changed == []:
        print_line(f"Nothing to do: {parsed.output} is prepared already; --force prepares it again.")
        return
    if changed:
        print_line(f"{', '.join(changed)} changed since {parsed.output} was prepared; preparing it again.")
    # Before the work, so that an output that cannot be written to does not show itself only after it.
    output = Path(parsed.output)
    is_new = not output.exists()
    make_directory(output)
    stamp.remove(parsed.output)
    try:
        inputs = stamp.input_states(parsed)  # before they are read: one that changes meanwhile is read again next time
        prepared = command.run(parsed)
    except BaseException:
        if is_new:
            with suppress(OSError):  # something is in it by now
                output.rmdir()
        raise
    stamp.write(parsed, command.VERSION, prepared, inputs)
    files = dict.fromkeys(name.partition("/")[0] + "/" * ("/" in name) for name in prepared.files)
    rows = {**prepared.counts, "files": ", ".join(files)}
    name, *words = command.NEXT.format(output=Path(parsed.output).absolute(), **prepared.fields).split()
    print_summary(f"Prepared: {parsed.output}", rows, [*typed_command(name), *words] if is_typed else [])
