"""The `prepare` list of a recipe: which of its commands are needed, and running those whose output is missing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ext.config.secrets import leaves
from verl_ext.console import print_line
from verl_ext.data.prepare import is_prepared, parse_arguments, prepare
from verl_ext.errors import UserError
from verl_ext.files import file_lock
from verl_ext.paths import base_directory

LOCK = ".prepare.lock"
"""Held while a command runs, in the directory in which `data/` is."""


def used_commands(
    commands: Sequence[str], values: Mapping[str, Any], further_values: Callable[[], Mapping[str, Any]]
) -> list[str]:
    """The commands whose output is, or contains, a path among some values; prints the missing ones among the others.

    A user who gives other data or another model does not need what the recipe would prepare for its own.

    Args:
        commands: the `prepare` list.
        values: of a configuration.
        further_values: reads those that matter only for commands that `values` does not need.
    """
    unused = _unused(commands, values)
    if unused:
        unused = _unused(unused, further_values())
    for command in missing_commands(unused):
        print_line(f"Not preparing what this configuration does not use: {command}")
    return [command for command in commands if command not in unused]


def missing_commands(commands: Iterable[str]) -> list[str]:
    """The commands whose output is missing or was made from other inputs."""
    return [command for command in commands if not is_prepared(_split(command))]


def run_commands(commands: Iterable[str]) -> None:
    """Run commands one by one; a second launch or node waits, and then finds the output."""
    for command in commands:
        with file_lock(base_directory() / LOCK):
            if not is_prepared(_split(command)):
                print_line(f"Preparing: {command}")
                prepare(_split(command))


def output_of(command: str) -> Path:
    """The directory that a command writes."""
    return _absolute(parse_arguments(_split(command)).output)


def is_within(path: object, directories: Iterable[Path]) -> bool:
    """Whether a path is one of some directories or in one of them; None is not."""
    if path is None:
        return False
    absolute = _absolute(str(path))
    return any(directory in (absolute, *absolute.parents) for directory in directories)


def _unused(commands: Iterable[str], values: Mapping[str, Any]) -> list[str]:
    texts = {value for _, value in leaves(values) if isinstance(value, str)}
    outputs = {command: output_of(command) for command in commands}
    return [command for command, output in outputs.items() if not any(is_within(text, [output]) for text in texts)]


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:  # "No closing quotation"
        raise UserError(f"the command {command!r} in prepare is malformed ({error}); correct it") from error


def _absolute(text: str) -> Path:
    return Path(os.path.abspath(Path(text).expanduser()))
