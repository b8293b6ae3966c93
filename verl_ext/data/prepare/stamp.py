"""The stamp `prepared.json`: written last, so its presence means that a preparation finished."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_ext.data.prepare.files import atomic_path

STAMP_NAME = "prepared.json"


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


def write(arguments: argparse.Namespace, version: int, prepared: Prepared) -> None:
    """Write the stamp.

    Args:
        arguments: the parsed command line; `force` is left out, since it does not change the result.
        version: the command's format version.
        prepared: what the command made.
    """
    content = {**_identity(arguments, version), "files": prepared.files, "counts": prepared.counts}
    with atomic_path(Path(arguments.output) / STAMP_NAME) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def remove(output: str) -> None:
    """Remove the stamp before files change, so that an interrupted preparation is not taken for a finished one."""
    (Path(output) / STAMP_NAME).unlink(missing_ok=True)


def is_current(arguments: argparse.Namespace, version: int) -> bool:
    """Tell whether the stamp has these arguments and this version, and every file it lists exists."""
    output = Path(arguments.output)
    content = _read(output / STAMP_NAME)
    identity = _identity(arguments, version)
    if content is None or any(content.get(name) != value for name, value in identity.items()):
        return False
    return all((output / name).is_file() for name in content["files"])


def _identity(arguments: argparse.Namespace, version: int) -> dict[str, Any]:
    options = {name: value for name, value in vars(arguments).items() if name not in ("command", "force")}
    return {"command": arguments.command, "version": version, "arguments": options}


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        # A stamp cut short by a crash of the machine is no stamp: the command simply runs again.
        return None
