"""Plans the conversion of JSON and CSV data files, and configures the run to read the converted files.

Nothing is written here: the launcher runs the planned commands.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from pathlib import Path

from verl_ext.data.config import ChatDataConfig, PromptDataConfig, file_list, is_raw
from verl_ext.data.prepare import COMMANDS
from verl_ext.data.prepare.output import STAMP_NAME, file_state, trust_stamp
from verl_ext.data.prepare.tables import TRAIN_NAME, VAL_NAME
from verl_ext.errors import UserError
from verl_ext.paths import caller_directory

VAL_FRACTION = 0.02
"""Share of the rows that is held out for validation if no validation set is given."""


def convert_raw_files(data: ChatDataConfig | PromptDataConfig, has_val_files: bool) -> tuple[list[str], list[str]]:
    """Replace JSON and CSV files by the parquet files that they are converted to.

    Each conversion writes into its own directory under `data/`, named after the first file and a digest of contents and
    settings, so that it runs once for the same files.

    Args:
        data: changed to name the converted files and their columns.
        has_val_files: whether `val_files` belongs to `train_files`; otherwise rows are held out for validation.

    Returns:
        The preparation commands, and a sentence for each key whose files are converted.

    Raises:
        UserError: a file cannot be read, or a setting does not apply to such files.
    """
    train, val = file_list(data.train_files), file_list(data.val_files)
    converts_train, converts_val = any(map(is_raw, train)), any(map(is_raw, val))
    splits = converts_train and not has_val_files
    if isinstance(data, ChatDataConfig) and not (data.multiturn.enable and data.multiturn.messages_key == "messages"):
        for key in ("prompt_dict_keys", "response_dict_keys"):
            if getattr(data, key) is not None:
                raise UserError(
                    f"data.{key} does not apply to JSON or CSV files; set it to null, or convert to parquet"
                )
        converts_train, converts_val = True, bool(val)  # all files of a run have the same columns
    commands: list[str] = []
    sentences: list[str] = []
    options = column_options(data)
    if converts_train:
        conversion = RawFileConversion(data, train, [*options, "--val-fraction", f"{VAL_FRACTION if splits else 0:g}"])
        data.train_files = f"{conversion.output}/{TRAIN_NAME}"
        commands.insert(0, conversion.command)
        sentences.append(conversion.sentence("data.train_files", data.train_files))
        if splits:
            data.val_files = f"{conversion.output}/{VAL_NAME}"
            sentences[0] += (
                f"; data.val_files is not set, so {VAL_FRACTION:.0%} of the rows are held out for validation"
            )
    if converts_val and not splits:
        conversion = RawFileConversion(data, val, [*options, "--val-fraction", "1"])
        data.val_files = f"{conversion.output}/{VAL_NAME}"
        commands.insert(0, conversion.command)
        sentences.append(conversion.sentence("data.val_files", data.val_files))
    # the columns of converted files
    data.prompt_key = "prompt" if isinstance(data, PromptDataConfig) else "question"
    if isinstance(data, ChatDataConfig):
        data.response_key = "answer"
        data.multiturn.enable = True
        data.multiturn.messages_key = "messages"
    return commands, sentences


class RawFileConversion:
    """The conversion of a run's raw files into one directory.

    Args:
        names: paths of the files, as the user gave them.

    Attributes:
        output: the directory to write.
        command: the preparation command.
    """

    def __init__(self, data: ChatDataConfig | PromptDataConfig, names: list[str], options: list[str]) -> None:
        self._names = names
        paths = [existing_file(name) for name in names]
        name = "chat" if isinstance(data, ChatDataConfig) else "prompts"
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", paths[0].stem)[:60]
        for earlier in Path("data").glob(f"{stem}-*/{STAMP_NAME}"):
            trust_stamp(earlier)
        settings = json.dumps([name, COMMANDS[name].version, *options, *(path.name for path in paths)])
        digest = hashlib.sha256(settings.encode())
        for path in paths:
            digest.update(bytes.fromhex(file_state(path).digest))
        self.output = f"data/{stem}-{digest.hexdigest()[:12]}"
        self.command = shlex.join([name, "--input", *map(str, paths), "--output", self.output, *options])

    def sentence(self, key: str, path: str) -> str:
        """Describe the conversion of the files that `key` names to the file `path`."""
        is_done = Path(self.output, STAMP_NAME).is_file()
        status = f"is read from {path}, converted earlier" if is_done else f"is converted to {path}"
        return f"{key}: {', '.join(self._names)} {status}"


def existing_file(name: str) -> Path:
    """A data file, looked up in the repository and then in the directory where the command was typed."""
    path = Path(name).expanduser()
    folders = list(dict.fromkeys([Path.cwd(), caller_directory().absolute()]))
    for folder in folders:
        if (folder / path).is_file():
            return path if folder == Path.cwd() else folder / path
    tried = " or ".join(str(folder / path) for folder in (folders[:1] if path.is_absolute() else folders))
    raise UserError(f"there is no data file {tried}; correct its path")


def column_options(data: ChatDataConfig | PromptDataConfig) -> list[str]:
    """Options of the preparation command for columns that have other names than verl's defaults."""
    if isinstance(data, PromptDataConfig):
        named = {"--prompt-key": (data.prompt_key, "prompt")}
    else:
        named = {
            "--messages-key": (data.multiturn.messages_key, "messages"),
            "--prompt-key": (data.prompt_key, "question"),
            "--response-key": (data.response_key, "answer"),
        }
    return [word for option, (value, usual) in named.items() if value != usual for word in (option, str(value))]
