"""Writing text, JSON and JSONL whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl_ext.errors import UserError
from verl_ext.files import replace_file


def write_text(path: Path, text: str) -> Path:
    """Replace a text file, making its directory when missing.

    Raises:
        UserError: it cannot be written.
    """
    return _replace(path, [text])


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Replace a JSON file, making its directory when missing.

    Raises:
        UserError: it cannot be written.
        ValueError: a number is not finite, which JSON has no way to say.
    """
    return _replace(path, [json.dumps(content, indent=2, allow_nan=False), "\n"])


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Replace a JSONL file, making its directory when missing; any text can be written, lone surrogates too.

    Raises:
        UserError: it cannot be written.
        ValueError: a number is not finite.
    """
    return _replace(path, (_one_line(row) for row in rows))


def _replace(path: Path, pieces: Iterable[str]) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, pieces)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error}); free disk space or name another output directory") from error
    return path


def _one_line(row: Mapping[str, Any]) -> str:
    line = json.dumps(row, ensure_ascii=False, allow_nan=False)
    # a lone surrogate has no UTF-8; as an escape it is good JSON
    return line.encode("utf-8", "backslashreplace").decode("utf-8") + "\n"
