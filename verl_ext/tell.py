"""Prints for the user, also when the terminal has just gone away."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from contextlib import suppress
from typing import TextIO

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""All but tabs and new lines; and surrogates, as in names that are not UTF-8, which no stream can encode."""
_problems: list[OSError] = []
"""Why standard output could not be written; a reader that has gone away is none."""


def tell(text: str, stream: TextIO | None = None, *, end: str = "\n") -> None:
    """Print a line and flush it.

    What cannot be written is dropped, from then on without a try: a hang-up (SIGHUP) takes the terminal and leaves the
    run to be saved, and a full disk that takes no more lines is no reason to lose training steps.

    Args:
        text: what to print; names of files and words of models may be in it, so that a terminal obeys none of it.
        stream: stdout when not given.
        end: what is printed behind it.
    """
    stream = sys.stdout if stream is None else stream
    wait_for_readers()
    try:
        print(printable(text), file=stream, end=end, flush=True)
    except OSError as error:
        _drop_from_now_on(stream, error)


def wait_for_readers() -> None:
    """Make stdout and stderr blocking, for libraries and child processes too, so that a slow reader loses nothing.

    Python without buffering (PYTHONUNBUFFERED) drops what a full non-blocking pipe does not take, and raises nothing.
    Any process that shares the pipe may make it non-blocking again, so `tell` calls this each time.
    """
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            with suppress(OSError):  # printing then shows what is wrong with the descriptor
                os.set_blocking(stream.fileno(), True)


def output_problem() -> OSError | None:
    """Flush standard output; returns why something that was printed there could not be written."""
    if sys.stdout is not None:
        wait_for_readers()
        try:
            sys.stdout.flush()
        except OSError as error:
            _drop_from_now_on(sys.stdout, error)
    return _problems[0] if _problems else None


def _drop_from_now_on(stream: TextIO, error: OSError) -> None:
    descriptor = stream.fileno()
    is_terminal = stat.S_ISCHR(os.fstat(descriptor).st_mode)
    is_gone = isinstance(error, BrokenPipeError) or (error.errno == errno.EIO and is_terminal)
    if descriptor == 1 and not is_gone:
        _problems.append(error)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)


def printable(text: str) -> str:
    """A text whose control characters, by which it could move the cursor or forge a line, are shown as escapes."""
    return _CONTROLS.sub(lambda found: _escape(ord(found[0])), text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
