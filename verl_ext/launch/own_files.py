"""Plans the conversion of JSON and CSV data files, and points the configuration at the converted ones."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from verl_ext.data.config import file_list
from verl_ext.data.prepare.commands import COMMANDS
from verl_ext.data.prepare.files import file_state
from verl_ext.data.prepare.split import TRAIN_NAME, VAL_NAME
from verl_ext.data.prepare.stamp import STAMP_NAME, trust
from verl_ext.errors import UserError
from verl_ext.paths import caller_directory
from verl_ext.trainer.stages import STAGES, GRPOConfig, RunConfig, SFTConfig, chosen_recipe, keys_set_by

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
TRAIN, VAL = "data.train_files", "data.val_files"
VAL_FRACTION = 0.02
"""Share of the rows that is kept for validation where no validation set is given."""
CONVERTERS = {"sft": "chat", "grpo": "prompts"}
"""Stages whose data may be such files, and the preparation command that converts them."""


def convert_own_files(config: RunConfig, overrides: Sequence[str]) -> list[str]:
    """Replace JSON and CSV files among the data by the parquet files that they are converted to.

    The commands that convert them are prepended to `prepare`, from which the launcher runs those whose output is
    missing. Each writes into its own directory under `data/`, named after the first file and a digest of contents and
    settings. This function writes nothing.

    Args:
        config: the resolved configuration; it is changed.
        overrides: the words of the command line.

    Returns:
        A sentence for each key whose files are converted.

    Raises:
        UserError: a file cannot be read, or a setting does not apply to such files.
    """
    if not isinstance(config, SFTConfig | GRPOConfig) or has_custom_class(config):
        return []
    train, val = file_list(config.data.train_files), file_list(config.data.val_files)
    raw = {TRAIN: any(map(is_raw, train)), VAL: any(map(is_raw, val))}
    splits = raw[TRAIN] and not sets_val_files(config, overrides)
    if splits:
        val, raw[VAL] = [], False
    if not any(raw.values()):
        return []
    if isinstance(config, SFTConfig) and not reads_messages(config):
        refuse_nested_keys(config)
        raw = {TRAIN: True, VAL: bool(val)}  # their columns would not be those of the converted files
    sentences = []
    options = column_options(config)
    if raw[TRAIN]:
        output = add_conversion(config, train, options, VAL_FRACTION if splits else 0)
        config.data.train_files = f"{output}/{TRAIN_NAME}"
        sentences.append(f"{TRAIN}: {', '.join(train)} {conversion_to(config.data.train_files)}")
        if splits:
            config.data.val_files = f"{output}/{VAL_NAME}"
            sentences[0] += f"; {VAL} is not set, so {VAL_FRACTION:.0%} of the rows are held out for validation"
    if raw[VAL]:
        output = add_conversion(config, val, options, 1)
        config.data.val_files = f"{output}/{VAL_NAME}"
        sentences.append(f"{VAL}: {', '.join(val)} {conversion_to(config.data.val_files)}")
    read_converted(config)
    return sentences


def has_custom_class(config: RunConfig) -> bool:
    """Whether a data set class of the user's reads the data."""
    return isinstance(config, SFTConfig) and config.data.custom_cls.path is not None


def conversion_to(path: str) -> str:
    """The predicate of a sentence about a data file whose conversion is `path`."""
    return (
        f"is read from {path}, converted earlier"
        if Path(path).with_name(STAMP_NAME).is_file()
        else f"is converted to {path}"
    )


def is_raw(name: str) -> bool:
    """Whether a data file has to be converted before it can be read."""
    return name.lower().endswith(SUFFIXES) and "://" not in name


def sets_val_files(config: RunConfig, overrides: Sequence[str]) -> bool:
    """Whether `data.val_files` is set on the command line, or in the recipe which also sets `data.train_files`.

    A recipe's validation set does not belong to other training data that the command line names.
    """
    typed = keys_set_by(config.stage, overrides)
    if TRAIN in typed or VAL in typed:
        return VAL in typed
    _, content, _ = chosen_recipe(STAGES[config.stage].command, overrides)
    return "val_files" in content.get("data", {})


def reads_messages(config: SFTConfig) -> bool:
    """Whether the run reads the column that converted files have."""
    return config.data.multiturn.enable and config.data.multiturn.messages_key == "messages"


def refuse_nested_keys(config: SFTConfig) -> None:
    """Keys that descend into columns have no meaning for files that are converted."""
    for key in ("prompt_dict_keys", "response_dict_keys"):
        if getattr(config.data, key) is not None:
            raise UserError(f"data.{key} does not apply to JSON or CSV files; set it to null, or convert to parquet")


def column_options(config: SFTConfig | GRPOConfig) -> list[str]:
    """Options of the converter that name columns, where the configuration names others than verl's defaults."""
    if isinstance(config, GRPOConfig):
        named = {"--prompt-key": (config.data.prompt_key, "prompt")}
    else:
        data = config.data
        named = {
            "--messages-key": (data.multiturn.messages_key, "messages"),
            "--prompt-key": (data.prompt_key, "question"),
            "--response-key": (data.response_key, "answer"),
        }
    return [word for option, (value, usual) in named.items() if value != usual for word in (option, str(value))]


def read_converted(config: SFTConfig | GRPOConfig) -> None:
    """Have the run read the columns of converted files."""
    config.data.prompt_key = "prompt" if isinstance(config, GRPOConfig) else "question"
    if isinstance(config, SFTConfig):
        config.data.response_key = "answer"
        config.data.multiturn.enable = True
        config.data.multiturn.messages_key = "messages"


def add_conversion(config: SFTConfig | GRPOConfig, names: list[str], options: list[str], val_fraction: float) -> str:
    """Put the command that converts some files into `prepare`; returns its output directory."""
    paths = [existing_file(name) for name in names]
    command = CONVERTERS[config.stage]
    words = [*options, "--val-fraction", f"{val_fraction:g}"]
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", paths[0].stem)[:60]
    for earlier in Path("data").glob(f"{stem}-*/{STAMP_NAME}"):
        trust(earlier)
    output = f"data/{stem}-{digest_of(command, paths, words)}"
    line = shlex.join([command, "--input", *map(str, paths), "--output", output, *words])
    config.prepare = [line, *config.prepare]
    return output


def existing_file(name: str) -> Path:
    """A data file by its path from the repository, or else from where the command was typed."""
    path = Path(name).expanduser()
    folders = list(dict.fromkeys([Path.cwd(), caller_directory().absolute()]))
    for folder in folders:
        if (folder / path).is_file():
            return path if folder == Path.cwd() else folder / path
    tried = " or ".join(str(folder / path) for folder in (folders[:1] if path.is_absolute() else folders))
    raise UserError(f"there is no data file {tried}; correct its path")


def digest_of(command: str, paths: Sequence[Path], words: Sequence[str]) -> str:
    """12 hexadecimal digits by which conversions differ: of contents, settings and the converter's version."""
    settings = json.dumps([command, COMMANDS[command].VERSION, *words, *(path.name for path in paths)])
    digest = hashlib.sha256(settings.encode())
    for path in paths:
        digest.update(bytes.fromhex(file_state(path).digest))
    return digest.hexdigest()[:12]
