"""A preparation command and its output directory, with atomically written files and a stamp.

The stamp `prepared.json` is written last, so its presence means that the preparation finished. It records the
arguments, the command's version, and digests of the inputs, from which a later run determines whether the output is up
to date.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_ext.commands import typed_command
from verl_ext.errors import UserError, first_line_of
from verl_ext.model_files import save_config, save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

STAMP_NAME = "prepared.json"
INPUT_OPTIONS = ("input", "exclude", "source", "format")
"""Options that may name input files. Other files, such as `--tokenizer`, do not affect the output."""


@dataclass(frozen=True)
class PrepareResult:
    """The result of a command.

    Attributes:
        files: written files, relative to the output directory.
        counts: statistics by name, which are printed and stored.
        next_fields: values for the fields of `PrepareCommand.next_command` other than `output`.
        next_overrides: words to append to it, with the same fields.
    """

    files: list[str]
    counts: dict[str, float]
    next_fields: dict[str, str] = field(default_factory=dict)
    next_overrides: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class PrepareCommand:
    """A command of `python -m verl_ext.data.prepare`.

    Attributes:
        name: name on the command line.
        help: description; the first sentence is the summary.
        example: name and options, for --help.
        next_command: the command to run next, starting with its name in `verl_ext.commands`; `{output}` and the fields
            of the result are replaced in each word.
        version: increased when the same arguments produce other files.
        add_arguments: adds the command's own options to its parser.
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
        """The command line to run after this command has written its output directory."""
        words = [*self.next_command.split(), *result.next_overrides]
        name, *words = (word.format(output=output, **result.next_fields) for word in words)
        return [*typed_command(name), *words]


# Writing


def make_directory(path: Path) -> None:
    """Create an output directory with its parents, unless it exists.

    Raises:
        UserError: the directory cannot be created or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the directory {path} ({error.strerror}); choose another --output") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"no permission to write to {path}; choose another --output")


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory, whose files are flushed to disk and moved to `target` at the end of the block.

    The directory is inside `target`, because a rename is atomic only within a file system. The files get the mode that
    the umask gives, because safetensors creates files that only their owner can read.

    Raises:
        UserError: `target` cannot be created or written to, or its disk is full.
    """
    make_directory(target)
    try:
        with tempfile.TemporaryDirectory(dir=target, prefix=".preparing-") as name:
            yield Path(name)
            os.umask(umask := os.umask(0))
            for path in sorted(Path(name).iterdir()):
                with path.open("rb") as file:
                    os.fchmod(file.fileno(), 0o666 & ~umask)
                    os.fsync(file.fileno())
                os.replace(path, target / path.name)
    except OSError as error:
        raise UserError(
            f"cannot write to {target} ({first_line_of(error)}); free some space, or choose another --output"
        ) from error


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """Yield a temporary path; the file is moved to `target` at the end of the block, see `staged_directory`."""
    with staged_directory(target.parent) as staging:
        yield staging / target.name


def write_model(
    directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | ProcessorMixin
) -> list[str]:
    """Write a model with its tokenizer or processor to a directory, and return the names of the files."""
    with staged_directory(directory) as staging:
        model.save_pretrained(staging)
        save_config(model.config, staging)
        save_tokenizer(tokenizer, staging)
        # transformers writes the GGUF that it has read to this file, and would load it as a SentencePiece model.
        (staging / "tokenizer.model").unlink(missing_ok=True)
        return sorted(path.name for path in staging.iterdir())


# Inputs


class FileState(NamedTuple):
    """Size, modification time and SHA-256 (hexadecimal) of a file."""

    size: int
    mtime_ns: int
    digest: str


Inputs = dict[str, dict[str, FileState]]
"""States by input name, then by path inside the input; the path is empty if the input is a file."""
_digests: dict[tuple[str, int, int], str] = {}
"""Digests by path, size and modification time."""


def file_state(path: Path) -> FileState:
    """State of a file; reads the file only if neither an earlier call nor a trusted stamp knows its digest.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        found = path.stat()
        key = str(path), found.st_size, found.st_mtime_ns
        if key not in _digests:
            with path.open("rb") as file:
                _digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path} ({first_line_of(error)}); check its path") from error
    return FileState(found.st_size, found.st_mtime_ns, _digests[key])


def trust_stamp(path: Path) -> None:
    """Let `file_state` use the digests in a stamp for files with unchanged size and modification time."""
    _trust(_read_stamp(path) or {})


def _trust(stamp: dict[str, Any]) -> None:
    for name, states in stamp.get("inputs", {}).items():
        for file, state in states.items():
            _digests.setdefault((str(_input_path(name) / file), state.size, state.mtime_ns), state.digest)


def input_states(arguments: argparse.Namespace, written: Collection[Path] = ()) -> Inputs:
    """States of the input files and directories of a command line.

    Args:
        written: files to skip, because they are output in an input directory.

    Raises:
        UserError: an input cannot be read.
    """
    values = [getattr(arguments, name, None) for name in INPUT_OPTIONS]
    names = [name for value in values if value for name in (value if isinstance(value, list) else [value])]
    inputs: Inputs = {}
    for name in names:
        path = _input_path(name)
        if path.is_file():
            inputs[name] = {"": file_state(path)}
        elif path.is_dir():
            inputs[name] = _directory_states(path, Path(arguments.output).resolve(), written)
    return inputs


def _input_path(name: str) -> Path:
    """The path of an input, which may also be a plugin, `path.py:NAME`."""
    code, _, function = name.rpartition(":")
    return Path(code if function.isidentifier() and Path(code).is_file() else name)


def _directory_states(directory: Path, output: Path, written: Collection[Path]) -> dict[str, FileState]:
    paths = []
    for folder, folders, names in os.walk(directory):
        here, resolved = Path(folder), Path(folder).resolve()
        folders[:] = [name for name in folders if not _is_ignored(name) and resolved / name != output]
        paths += [here / name for name in names if not _is_ignored(name) and resolved / name not in written]
    states = {}
    for path in sorted(paths):
        with suppress(UserError):  # removed or unreadable; a command that needs the file reports it
            if path.is_file():
                states[str(path.relative_to(directory))] = file_state(path)
    return states


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


# The stamp


def write_stamp(command: PrepareCommand, arguments: argparse.Namespace, result: PrepareResult, inputs: Inputs) -> None:
    """Write the stamp of a finished preparation.

    Args:
        inputs: the `input_states` from before the command read the inputs.
    """
    written = _written_paths(arguments, result.files)
    inputs = {
        name: {file: state for file, state in states.items() if Path(name).resolve() / file not in written}
        for name, states in inputs.items()
    }
    identity = _identity(command, arguments)
    stamp = {**identity, "inputs": inputs, "files": result.files, "counts": result.counts}
    _replace_stamp(Path(arguments.output) / STAMP_NAME, stamp)


def remove_stamp(output: Path) -> None:
    """Remove the stamp before files change, so that an interrupted preparation does not look finished."""
    (output / STAMP_NAME).unlink(missing_ok=True)


def changed_inputs(command: PrepareCommand, arguments: argparse.Namespace) -> list[str] | None:
    """Inputs that changed since the output was prepared; None if the output is missing or was prepared differently.

    An input that no longer exists does not count as changed, because its prepared files suffice.
    """
    output = Path(arguments.output)
    stamp = _read_stamp(output / STAMP_NAME)
    identity = _identity(command, arguments)
    if stamp is None or any(stamp.get(name) != value for name, value in identity.items()):
        return None
    if not all((output / name).is_file() for name in stamp["files"]):
        return None
    recorded = stamp["inputs"]
    _trust(stamp)
    inputs = input_states(arguments, _written_paths(arguments, stamp["files"]))
    changed = [name for name, states in inputs.items() if _digests_of(recorded.get(name)) != _digests_of(states)]
    # Another preparation that has started meanwhile has removed the stamp, which must not reappear.
    if not changed and {**recorded, **inputs} != recorded and _read_stamp(output / STAMP_NAME) == stamp:
        with suppress(OSError, UserError):  # then the next launch reads the inputs again
            _replace_stamp(output / STAMP_NAME, {**stamp, "inputs": {**recorded, **inputs}})
    return changed


def _written_paths(arguments: argparse.Namespace, files: list[str]) -> set[Path]:
    return {Path(arguments.output).resolve() / name for name in (*files, STAMP_NAME)}


def _identity(command: PrepareCommand, arguments: argparse.Namespace) -> dict[str, Any]:
    options = {name: value for name, value in vars(arguments).items() if name not in ("command", "force")}
    return {"command": command.name, "version": command.version, "arguments": options}


def _digests_of(states: dict[str, FileState] | None) -> dict[str, str] | None:
    return None if states is None else {file: state.digest for file, state in states.items()}


def _read_stamp(path: Path) -> dict[str, Any] | None:
    """Read a stamp; None if it is missing or damaged, for example after a crash, so that the command runs again."""
    if not path.is_file():
        return None
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(stamp, dict) or not isinstance(stamp.get("files"), list):
        return None
    try:
        return {**stamp, "inputs": {name: _parse_states(states) for name, states in stamp["inputs"].items()}}
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _parse_states(states: Any) -> dict[str, FileState]:
    parsed = {file: FileState(*state) for file, state in states.items()}
    for state in parsed.values():
        bytes.fromhex(state.digest)  # the launcher relies on it
    return parsed


def _replace_stamp(path: Path, stamp: dict[str, Any]) -> None:
    with staged_file(path) as temporary:
        temporary.write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
