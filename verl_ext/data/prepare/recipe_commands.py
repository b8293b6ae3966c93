"""Preparation by the launcher: runs a recipe's `prepare` commands, and converts JSON and CSV data files to parquet."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ext.config.secrets import leaves
from verl_ext.console import print_line
from verl_ext.data.config import ChatDataConfig, PromptDataConfig, file_list
from verl_ext.data.prepare import COMMANDS, is_prepared, parse_arguments, prepare
from verl_ext.data.prepare.command import STAMP_NAME, file_state, trust_stamp
from verl_ext.data.prepare.tables import TRAIN_NAME, VAL_NAME
from verl_ext.errors import UserError
from verl_ext.files import file_lock
from verl_ext.paths import base_directory, caller_directory

LOCK = ".prepare.lock"
"""Lock file next to `data/`, held while a command runs."""
VAL_FRACTION = 0.02
"""Share of the rows to hold out if no validation set is given."""

# The `prepare` list of a recipe


def used_commands(
    commands: Sequence[str], values: Mapping[str, Any], further_values: Callable[[], Mapping[str, Any]]
) -> list[str]:
    """Select the commands whose output a configuration uses, and print unused commands with missing outputs.

    A command is used if a value is a path to its output or inside it. With other data or another model, the user does
    not need the recipe's own preparation.

    Args:
        commands: the `prepare` list.
        values: values of the configuration.
        further_values: reads more values; called only if `values` leaves commands unused.
    """
    unused = _unused(commands, values)
    if unused:
        unused = _unused(unused, further_values())
    for command in missing_commands(unused):
        print_line(f"Skipping a preparation that this configuration does not use: {command}")
    return [command for command in commands if command not in unused]


def missing_commands(commands: Iterable[str]) -> list[str]:
    """The commands whose output is missing or was prepared from other inputs."""
    return [command for command in commands if not is_prepared(_split(command))]


def run_commands(commands: Iterable[str]) -> None:
    """Run commands in order; a concurrent launch or node waits and then finds the output."""
    for command in commands:
        with file_lock(base_directory() / LOCK):
            if not is_prepared(_split(command)):
                print_line(f"Preparing: {command}")
                prepare(_split(command))


def output_of(command: str) -> Path:
    """The output directory of a command."""
    return _absolute(parse_arguments(_split(command)).output)


def is_within(path: object, directories: Iterable[Path]) -> bool:
    """Whether a path is one of some directories or inside one of them; false for None."""
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


# JSON and CSV data files: these functions only plan commands, which the launcher runs


def convert_raw_files(data: ChatDataConfig | PromptDataConfig, has_val_files: bool) -> tuple[list[str], list[str]]:
    """Replace raw files with the parquet files that they are converted to.

    Each conversion writes to its own directory in `data/`, named after the first file and a digest of contents and
    settings, so that it runs only once for the same files.

    Args:
        data: modified to name the converted files and their columns.
        has_val_files: whether `val_files` belongs to `train_files`; otherwise rows are held out for validation.

    Returns:
        The preparation commands, and a message for each key whose files are converted.

    Raises:
        UserError: a file cannot be read, or a setting does not apply to such files.
    """
    train, val = file_list(data.train_files), file_list(data.val_files)
    converts_train, converts_val = any(map(data.is_raw, train)), any(map(data.is_raw, val))
    splits = converts_train and not has_val_files
    if not has_converted_columns(data):
        for key in ("prompt_dict_keys", "response_dict_keys"):
            if getattr(data, key, None) is not None:
                raise UserError(
                    f"data.{key} does not apply to files that are converted; set it to null, or write parquet files "
                    "with the columns of verl's SFT format and without a column of system prompts"
                )
        converts_train, converts_val = True, bool(val)  # all files of a run have the same columns
    commands: list[str] = []
    sentences: list[str] = []
    options = column_options(data)

    def convert(key: str, names: list[str], val_fraction: float, file: str) -> str:
        """Replace the files of a key with the converted file, and return its directory."""
        output, command = plan_conversion(data, names, [*options, "--val-fraction", f"{val_fraction:g}"])
        path, is_done = f"{output}/{file}", Path(output, STAMP_NAME).is_file()
        status = f"was already converted to {path}" if is_done else f"is converted to {path}"
        commands.insert(0, command)
        sentences.append(f"data.{key}: {', '.join(names)} {status}")
        setattr(data, key, path)
        return output

    if converts_train:
        output = convert("train_files", train, VAL_FRACTION if splits else 0, TRAIN_NAME)
        if splits:
            data.val_files = f"{output}/{VAL_NAME}"
            sentences[0] += (
                f"; data.val_files is not set, so {VAL_FRACTION:.0%} of the rows are held out for validation"
            )
    if converts_val and not splits:
        convert("val_files", val, 1, VAL_NAME)
    # the columns of converted files
    data.prompt_key = "prompt" if isinstance(data, PromptDataConfig) else "question"
    if isinstance(data, ChatDataConfig):
        data.response_key = "answer"
        data.multiturn.enable = True
        data.multiturn.messages_key = "messages"
    return commands, sentences


def has_converted_columns(data: ChatDataConfig | PromptDataConfig) -> bool:
    """Whether the configuration names the columns that converted files have."""
    if isinstance(data, PromptDataConfig):
        return data.prompt_key == "prompt"
    return data.multiturn.enable and data.multiturn.messages_key == "messages"


def plan_conversion(data: ChatDataConfig | PromptDataConfig, names: list[str], options: list[str]) -> tuple[str, str]:
    """The output directory and the preparation command for some raw files.

    Args:
        names: paths of the files, as the user gave them.
        options: options of the command.
    """
    paths = [existing_file(name) for name in names]
    name = "chat" if isinstance(data, ChatDataConfig) else "prompts"
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", paths[0].stem)[:60]
    for earlier in Path("data").glob(f"{stem}-*/{STAMP_NAME}"):
        trust_stamp(earlier)
    settings = json.dumps([name, COMMANDS[name].version, *options, *(path.name for path in paths)])
    digest = hashlib.sha256(settings.encode())
    for path in paths:
        digest.update(bytes.fromhex(file_state(path).digest))
    output = f"data/{stem}-{digest.hexdigest()[:12]}"
    return output, shlex.join([name, "--input", *map(str, paths), "--output", output, *options])


def existing_file(name: str) -> Path:
    """Find a data file in the repository, or else in the directory where the command was typed."""
    path = Path(name).expanduser()
    folders = list(dict.fromkeys([Path.cwd(), caller_directory().absolute()]))
    for folder in folders:
        if (folder / path).is_file():
            return path if folder == Path.cwd() else folder / path
    tried = " or ".join(str(folder / path) for folder in (folders[:1] if path.is_absolute() else folders))
    fix = "list the files, such as [a.jsonl,b.jsonl]" if "*" in name else "correct its path"
    raise UserError(f"there is no data file {tried}; {fix}")


def column_options(data: ChatDataConfig | PromptDataConfig) -> list[str]:
    """Options of the preparation command for columns whose names differ from verl's defaults."""
    if isinstance(data, PromptDataConfig):
        named = {"--prompt-key": (data.prompt_key, "prompt")}
    else:
        named = {
            "--messages-key": (data.multiturn.messages_key, "messages"),
            "--prompt-key": (data.prompt_key, "question"),
            "--response-key": (data.response_key, "answer"),
        }
    return [word for option, (value, usual) in named.items() if value != usual for word in (option, str(value))]
