"""Ids of problems that must not be trained on, read from a list or from the problems themselves."""

from __future__ import annotations

import json
from pathlib import Path

from verl_ext.errors import UserError, first_line_of


def read_excluded_ids(name: str | None, id_key: str) -> set[str]:
    """Read the ids to leave out.

    Args:
        name: a text file with one id per line, or JSONL whose objects hold the id; None excludes nothing.
        id_key: where the JSONL objects hold the id.

    Returns:
        The ids as text.

    Raises:
        UserError: the file cannot be read, holds no id, or one of its objects has no such key.
    """
    if name is None:
        return set()
    try:
        lines = Path(name).read_text(encoding="utf-8-sig").split("\n")  # a text may hold other line breaks
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --exclude {name} ({first_line_of(error)}); check its path and format") from error
    ids = {_id_of(line.strip(), id_key, f"{name} line {n}") for n, line in enumerate(lines, start=1) if line.strip()}
    if not ids:
        raise UserError(f"--exclude {name} holds no id; remove the option or give a file with one id per line")
    return ids


def _id_of(line: str, id_key: str, where: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        return str(json.loads(line)[id_key])
    except (KeyError, ValueError) as error:
        raise UserError(f"{where} is no JSON object with {id_key!r}; mend it or name the key by --id-key") from error
