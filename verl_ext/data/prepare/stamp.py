"""The stamp `prepared.json`: written last, so its presence means that a preparation finished."""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_ext.data.prepare.files import atomic_path, file_digest

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


def write(arguments: argparse.Namespace, version: int, prepared: Prepared, inputs: dict[str, str]) -> None:
    """Write the stamp.

    Args:
        arguments: the parsed command line; `force` is left out, since it does not change the result.
        version: the command's format version.
        prepared: what the command made.
        inputs: see `input_digests`, as they were before the command read them.
    """
    content = {**_identity(arguments, version), "inputs": inputs, "files": prepared.files, "counts": prepared.counts}
    with atomic_path(Path(arguments.output) / STAMP_NAME) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def input_digests(arguments: argparse.Namespace) -> dict[str, str]:
    """Digests of the files and directories that a command line names as its input, by name.

    Raises:
        UserError: one cannot be read.
    """
    values = [getattr(arguments, name, None) for name in INPUT_OPTIONS]
    names = [name for value in values if value for name in (value if isinstance(value, list) else [value])]
    digests = {}
    for name in names:
        code, _, function = name.rpartition(":")
        path = Path(code if function.isidentifier() and Path(code).is_file() else name)
        if path.is_file():
            digests[name] = file_digest(path)
        elif path.is_dir():
            digests[name] = _directory_digest(path)
    return digests


def _directory_digest(directory: Path) -> str:
    """Changes with the name, size or modification time of any file; the contents may be too much to read each time."""
    files = [(path, path.stat()) for path in sorted(directory.rglob("*")) if path.is_file()]
    listed = [(str(path.relative_to(directory)), found.st_size, found.st_mtime_ns) for path, found in files]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


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
    digests = input_digests(arguments)
    if digests and "inputs" not in content:  # of a version that kept no digests
        return None
    return [name for name, digest in digests.items() if content["inputs"].get(name) != digest]


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
    is_stamp = isinstance(content, dict) and isinstance(content.get("files"), list)
    return content if is_stamp and isinstance(content.get("inputs", {}), dict) else None
