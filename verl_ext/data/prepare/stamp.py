"""The stamp `prepared.json`: written last, so its presence means that a preparation finished."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_ext.data.prepare.files import FileState, atomic_path, file_state, trust_state
from verl_ext.errors import UserError

Inputs = dict[str, dict[str, FileState]]
"""By the input's name, the files of a directory by their relative paths; a file that is an input itself is ''."""
STAMP_NAME = "prepared.json"
INPUT_OPTIONS = ("input", "exclude", "source", "format")
"""Options that may name files; others, such as `--tokenizer`, do not change what is written."""


@dataclass(frozen=True)
class Prepared:
    """What a command made.

    Attributes:
        files: relative to its output directory.
        counts: to print and to keep.
        fields: values of the fields of its `NEXT` other than `output`.
    """

    files: list[str]
    counts: dict[str, float] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)


def write(arguments: argparse.Namespace, version: int, prepared: Prepared, inputs: Inputs) -> None:
    """Write the stamp.

    Args:
        arguments: the parsed command line; `force` is left out, since it does not change the result.
        version: the command's format version.
        prepared: what the command made.
        inputs: see `input_states`, as they were before the command read them.
    """
    written = _written(arguments, prepared.files)
    inputs = {
        name: {file: state for file, state in states.items() if Path(name).resolve() / file not in written}
        for name, states in inputs.items()
    }
    content = {**_identity(arguments, version), "inputs": inputs, "files": prepared.files, "counts": prepared.counts}
    _write(Path(arguments.output) / STAMP_NAME, content)


def input_states(arguments: argparse.Namespace, written: Collection[Path] = ()) -> Inputs:
    """The files and directories that a command line names as its input.

    Args:
        arguments: the parsed command line.
        written: files that are output, not input, where both are the same directory.

    Raises:
        UserError: one cannot be read.
    """
    values = [getattr(arguments, name, None) for name in INPUT_OPTIONS]
    names = [name for value in values if value for name in (value if isinstance(value, list) else [value])]
    inputs: Inputs = {}
    for name in names:
        path = _path_of(name)
        if path.is_file():
            inputs[name] = {"": file_state(path)}
        elif path.is_dir():
            inputs[name] = _directory_states(path, Path(arguments.output).resolve(), written)
    return inputs


def trust(path: Path) -> None:
    """Spare the reading of inputs whose size and modification time are those in a stamp."""
    _trust(_read(path) or {})


def _trust(content: dict[str, Any]) -> None:
    for name, states in content.get("inputs", {}).items():
        if isinstance(states, dict):
            for file, state in states.items():
                trust_state(_path_of(name) / file, state)


def _path_of(name: str) -> Path:
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
        with suppress(UserError):  # gone meanwhile, or unreadable: a command that needs it says so
            if path.is_file():
                states[str(path.relative_to(directory))] = file_state(path)
    return states


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _written(arguments: argparse.Namespace, files: list[str]) -> set[Path]:
    return {Path(arguments.output).resolve() / name for name in (*files, STAMP_NAME)}


def remove(output: str) -> None:
    """Remove the stamp before files change, so that an interrupted preparation is not taken for a finished one."""
    (Path(output) / STAMP_NAME).unlink(missing_ok=True)


def is_current(arguments: argparse.Namespace, version: int) -> bool:
    """Tell whether the stamp has these arguments and this version, every file it lists exists, and no input changed."""
    return changed_inputs(arguments, version) == []


def changed_inputs(arguments: argparse.Namespace, version: int) -> list[str] | None:
    """The inputs that changed since the output was made; None if it is missing or was made in another way.

    An input that is gone has not changed: whoever has the prepared files does not need it.
    """
    output = Path(arguments.output)
    content = _read(output / STAMP_NAME)
    identity = _identity(arguments, version)
    if content is None or any(content.get(name) != value for name, value in identity.items()):
        return None
    if not all((output / name).is_file() for name in content["files"]):
        return None
    kept = content.get("inputs", {})
    _trust(content)
    inputs = input_states(arguments, _written(arguments, content["files"]))
    if inputs and "inputs" not in content:  # of a version that kept no digests
        return None
    changed = [name for name, states in inputs.items() if not _is_same(kept.get(name), states)]
    # A preparation that has begun meanwhile has removed the stamp, which then must not come back.
    if not changed and {**kept, **inputs} != kept and _read(output / STAMP_NAME) == content:
        with suppress(OSError, UserError):  # the next launch reads the inputs again
            _write(output / STAMP_NAME, {**content, "inputs": {**kept, **inputs}})
    return changed


def _is_same(kept: dict[str, FileState] | str | None, states: dict[str, FileState]) -> bool:
    """Whether an input has the content that a stamp knows it by: a text in stamps of a version that kept no times."""
    if not isinstance(kept, str):
        return kept is not None and _digests(kept) == _digests(states)
    if "" in states:
        return kept == states[""].digest
    listed = [(file, state.size, state.mtime_ns) for file, state in states.items()]
    return kept == hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _digests(states: dict[str, FileState]) -> dict[str, str]:
    return {file: state.digest for file, state in states.items()}


def _identity(arguments: argparse.Namespace, version: int) -> dict[str, Any]:
    options = {name: value for name, value in vars(arguments).items() if name not in ("command", "force")}
    return {"command": arguments.command, "version": version, "arguments": options}


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        # A stamp cut short by a crash of the machine is no stamp: the command simply runs again.
        return None
    if not isinstance(content, dict) or not isinstance(content.get("files"), list):
        return None
    try:
        inputs = {name: _parsed(states) for name, states in content.get("inputs", {}).items()}
    except (AttributeError, TypeError, ValueError):
        return None
    return {**content, "inputs": inputs} if "inputs" in content else content


def _parsed(states: Any) -> dict[str, FileState] | str:
    if isinstance(states, str):
        return states
    parsed = {file: FileState(*state) for file, state in states.items()}
    for state in parsed.values():
        bytes.fromhex(state.digest)  # others rely on it
    return parsed


def _write(path: Path, content: dict[str, Any]) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
