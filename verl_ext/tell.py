"""Prints for the user, also when the terminal has just gone away."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All but tabs and new lines."""


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print a line and flush it.

    A hang-up (SIGHUP) takes the terminal and leaves the run to be saved: nobody is there to read any more, so from
    then on what is printed goes nowhere, and neither a traceback nor another exit code comes of it.

    Args:
        text: what to print; names of files and words of models may be in it, so that a terminal obeys none of it.
        stream: stdout when not given.
    """
    stream = sys.stdout if stream is None else stream
    try:
        print(printable(text), file=stream, flush=True)
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def printable(text: str) -> str:
    """A text whose control characters, by which it could move the cursor or forge a line, are shown as escapes."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
