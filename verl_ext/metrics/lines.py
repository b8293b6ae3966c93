"""A text file that only grows by whole lines, and is mended after a kill in the middle of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from verl_ext.console import warn
from verl_ext.errors import UserError

_BLOCK_BYTES = 64 * 1024


class LineWriter:
    """Appends lines; each one is handed to the operating system before `write` returns, so a kill cannot lose it."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending, creating it when missing.

        Raises:
            OSError: the file cannot be opened.
        """
        self._file = open(path, "ab", buffering=0)

    def write(self, line: str) -> None:
        """Append one line.

        Args:
            line: the text, without its newline.

        Raises:
            OSError: the disk is full or gone; a part of the line may have been written.
        """
        data = line.encode() + b"\n"
        while data:  # an unbuffered write may take fewer bytes than it was given
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn a failure of the file system into one sentence that says which file and why.

    Raises:
        UserError: in the place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); make room or make the directory writable") from error


def drop_torn_tail(path: Path, is_complete: Callable[[bytes], bool]) -> None:
    """Cut the lines at the end of `path` that a kill or a crash left unreadable, with a warning.

    Args:
        path: an existing file.
        is_complete: says of one line, with its newline where it has one, whether it is to be kept.

    Raises:
        OSError: the file cannot be read or cut.
    """
    with open(path, "r+b") as file:
        size = end = file.seek(0, 2)
        while end > 0:
            start = _start_of_last_line(file, end)
            if is_complete(_read_between(file, start, end)):
                break
            end = start
        if end < size:
            file.truncate(end)
            warn(f"{path} ended in the middle of a line; its last {size - end} bytes were removed")


def end_with_newline(path: Path) -> None:
    """Add the newline that the last line of `path` lacks, if it lacks one."""
    with open(path, "r+b") as file:
        size = file.seek(0, 2)
        if size and _read_between(file, size - 1, size) != b"\n":
            file.write(b"\n")


def _start_of_last_line(file: BinaryIO, end: int) -> int:
    # Backwards in blocks: the file of a long run is far larger than its last line.
    stop = end - 1  # the byte at `end - 1` may be the line's own newline
    while stop > 0:
        start = max(0, stop - _BLOCK_BYTES)
        newline = _read_between(file, start, stop).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        stop = start
    return 0


def _read_between(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)
