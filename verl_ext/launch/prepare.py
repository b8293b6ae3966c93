"""Makes the model and data that a recipe prepares itself, where they are missing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from verl_ext.config.compose import load_yaml
from verl_ext.config.recipes import find_recipe
from verl_ext.config.schema import as_dict
from verl_ext.console import print_line
from verl_ext.data.prepare import is_prepared, prepare
from verl_ext.data.prepare.commands import parse_arguments
from verl_ext.errors import UserError
from verl_ext.files import file_lock
from verl_ext.paths import base_directory
from verl_ext.trainer.stages import RunConfig

PREPARE_LOCK = ".prepare.lock"


def commands_to_run(config: RunConfig) -> list[str]:
    """The commands of the recipe's `prepare` list whose result is needed and not there yet."""
    return [command for command in needed_commands(config) if not is_prepared(_words(command))]


def output_of(command: str) -> Path:
    """The directory that a command of `prepare` writes."""
    return _absolute(parse_arguments(_words(command)).output)


def is_within(path: object, directories: Iterable[Path]) -> bool:
    """Whether a path is one of some directories or in one of them."""
    return path is not None and any(_holds(directory, [_absolute(str(path))]) for directory in directories)


def prepare_inputs(commands: Iterable[str]) -> None:
    """Run the commands of `commands_to_run`.

    Raises:
        UserError: a command that does not exist or cannot do its work.
    """
    for command in commands:
        words = _words(command)
        if not is_prepared(words):
            # Several launches, or nodes, at once: the others wait and find it done.
            with file_lock(base_directory() / PREPARE_LOCK):
                if not is_prepared(words):
                    print_line(f"Preparing: {command}")
                    prepare(words)


def needed_commands(config: RunConfig) -> list[str]:
    """The commands of `prepare` whose `--output` holds a path that the configuration or its evaluation recipe names.

    A user who gives other data or another model does not need the rest.
    """
    settings = {key: value for key, value in as_dict(config).items() if key != "prepare"}
    named = {_absolute(text) for text in _texts(settings)}
    outputs = {command: output_of(command) for command in config.prepare}
    if not all(_holds(output, named) for output in outputs.values()):
        evaluation = load_yaml(find_recipe("eval", config.eval.recipe_name))
        named |= {_absolute(text) for text in _texts(evaluation)}
    needed = [command for command, output in outputs.items() if _holds(output, named)]
    for command in outputs:
        if command not in needed and not is_prepared(_words(command)):
            print_line(f"Not preparing what this configuration does not use: {command}")
    return needed


def _words(command: str) -> list[str]:
    """A command of `prepare` as a shell splits it.

    Raises:
        UserError: it cannot be split.
    """
    try:
        return shlex.split(command)
    except ValueError as error:  # "No closing quotation"
        raise UserError(f"the command {command!r} in prepare is malformed ({error}); correct it") from error


def _holds(output: Path, named: Iterable[Path]) -> bool:
    return any(path == output or output in path.parents for path in named)


def _absolute(text: str) -> Path:
    return Path(os.path.abspath(Path(text).expanduser()))


def _texts(value: Any) -> Iterator[str]:
    """Every text in nested mappings and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
