"""What a preparation command consists of, and what it returns."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field

from verl_ext.commands import typed_command


@dataclass(frozen=True)
class PrepareResult:
    """What a command wrote.

    Attributes:
        files: paths relative to the output directory.
        counts: statistics by name, which are printed and stored.
        next_fields: values for the fields of `PrepareCommand.next_command` other than `output`.
    """

    files: list[str]
    counts: dict[str, float] = field(default_factory=dict)
    next_fields: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PrepareCommand:
    """One command of `python -m verl_ext.data.prepare`.

    Attributes:
        name: the word that selects the command.
        help: what the command does; the first sentence is its summary.
        example: name and options, for --help.
        next_command: what to run afterwards, by its name in `verl_ext.commands`; `{output}` and the result's fields are
            filled in word by word.
        version: raised when the same arguments would give other files.
        add_arguments: adds the command's own options, if it has any, to its parser.
        run: writes the files; raises `UserError` for bad input.
    """

    name: str
    help: str
    example: str
    next_command: str
    version: int
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    run: Callable[[argparse.Namespace], PrepareResult]

    def next_words(self, output: str, result: PrepareResult) -> list[str]:
        """The command to run after this one has written an output directory."""
        name, *words = (word.format(output=output, **result.next_fields) for word in self.next_command.split())
        return [*typed_command(name), *words]
