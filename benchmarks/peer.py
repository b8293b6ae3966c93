"""TRL, which some benchmarks have beside ours, in a directory of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.running import run
from verl_ext.command_line import CommandParser

TRL = "trl==1.6.0"
"""The newest that works with the vLLM of this project's environment."""


def add_peer(parser: CommandParser, *, required: bool = False) -> None:
    """Add `--peer`, which `with_peer` reads."""
    parser.add_argument(
        "--peer",
        type=Path,
        metavar="DIR",
        required=required,
        help="directory of TRL's own; it is installed where it is not there",
    )


def with_peer(directory: Path) -> Path:
    """The directory as an absolute path, with TRL in it; that uses this environment's torch and transformers.

    Raises:
        UserError: it cannot be installed.
    """
    if not (directory / "trl").is_dir():
        words = ["install", "--quiet", "--no-deps", "--target", str(directory.absolute()), TRL]
        run([sys.executable, "-m", "pip", *words])
    return directory.absolute()
