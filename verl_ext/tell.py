"""Prints for the user, also when the terminal has just gone away."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print a line and flush it.

    A hang-up (SIGHUP) takes the terminal and leaves the run to be saved: nobody is there to read any more, so from
    then on what is printed goes nowhere, and neither a traceback nor another exit code comes of it.

    Args:
        text: what to print.
        stream: stdout when not given.
    """
    stream = sys.stdout if stream is None else stream
    try:
        print(text, file=stream, flush=True)
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
