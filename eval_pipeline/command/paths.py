"""Paths on the command line: looked up where the user stands, though run.sh has changed to the repository."""

from __future__ import annotations

import os
from pathlib import Path

from eval_pipeline.problems.source import REPOSITORY


def where_the_user_stands() -> Path:
    """The directory that the command was typed in."""
    return Path(os.environ.get("VERL_EXT_CALLED_FROM", "."))


def input_path(text: str) -> Path:
    """Something to read: where the user stands, or in the repository where it is only there.

    Args:
        text: as typed; `~` is the home directory.
    """
    path = Path(text).expanduser()
    here, there = where_the_user_stands() / path, REPOSITORY / path
    return there if there.exists() and not here.exists() else here


def output_path(text: str) -> Path:
    """Something to write, where the user stands; `text` is as for `input_path`."""
    return where_the_user_stands() / Path(text).expanduser()


# argparse names the type function in its messages
input_path.__name__ = output_path.__name__ = "path"
