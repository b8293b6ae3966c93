"""Paths on the command line: relative to the directory in which the command was typed; run.sh changes to another."""

from __future__ import annotations

from pathlib import Path

from verl_ext.paths import base_directory, caller_directory


def input_path(text: str) -> Path:
    """Something to read: in the caller's directory, or in the base directory if it is only there.

    Args:
        text: as typed; `~` is the home directory.
    """
    path = Path(text).expanduser()
    here, there = caller_directory() / path, base_directory() / path
    return there if there.exists() and not here.exists() else here


def output_path(text: str) -> Path:
    """Something to write, in the caller's directory; `text` is as for `input_path`."""
    return caller_directory() / Path(text).expanduser()


# argparse names the type function in its messages
input_path.__name__ = output_path.__name__ = "path"
