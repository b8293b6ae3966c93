"""Console output for users: lines, warnings, progress bars, tables and summaries."""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from verl_ext.paths import caller_directory

if TYPE_CHECKING:
    from tqdm import tqdm

Item = TypeVar("Item")
Warn = Callable[[str], None]

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters except tabs and newlines, and surrogates (from names that are not UTF-8), which no stream encodes.
"""
LINE_EVERY_S = 60.0
"""Seconds between two lines of progress without a terminal."""
_write_errors: list[OSError] = []
"""Errors of writing to standard output. A reader that closes the pipe is not an error."""


# Lines


def print_line(text: str, stream: TextIO | None = None, *, end: str = "\n") -> None:
    """Print a line to standard output or another stream, and flush it.

    If the stream cannot be written, this line and all later lines are dropped: after a hang-up (SIGHUP), the run must
    still be saved without a terminal, and a full disk under a log file must not cost training steps. Control characters
    are escaped, because the text may contain file names and model output.
    """
    _print(printable(text) + end, sys.stdout if stream is None else stream)


def print_marked(segments: Iterable[tuple[str, bool]]) -> None:
    """Print text of which some segments are marked: green on a terminal, otherwise in [[double brackets]].

    Args:
        segments: text, and whether it is marked.
    """
    in_color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    start, end = ("\x1b[1;32m", "\x1b[0m") if in_color else ("[[", "]]")
    parts = (f"{start}{printable(text)}{end}" if marked else printable(text) for text, marked in segments)
    _print("".join(parts) + "\n", sys.stdout)


def _print(text: str, stream: TextIO) -> None:
    make_streams_blocking()
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)  # a locale without UTF-8 lacks most characters
    try:
        print(text, file=stream, end="", flush=True)
    except OSError as error:
        _discard_output(stream, error)


def warn(message: str) -> None:
    """Print a warning to standard error; the message says what is wrong and what happens instead."""
    print_line(f"warning: {message}", sys.stderr)


def make_streams_blocking() -> None:
    """Make stdout and stderr blocking, also for libraries and child processes, so that a slow reader loses nothing.

    Without buffering (PYTHONUNBUFFERED), Python silently drops output that a full non-blocking pipe does not accept.
    Any process that shares the pipe can make it non-blocking again, so `print_line` calls this each time.
    """
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            with suppress(OSError):  # printing reports problems of the descriptor
                os.set_blocking(stream.fileno(), True)


def output_error() -> OSError | None:
    """Flush standard output, and return the first error that lost output, if any."""
    if sys.stdout is not None:
        make_streams_blocking()
        try:
            sys.stdout.flush()
        except OSError as error:
            _discard_output(sys.stdout, error)
    return _write_errors[0] if _write_errors else None


def _discard_output(stream: TextIO, error: OSError) -> None:
    descriptor = stream.fileno()
    is_terminal = stat.S_ISCHR(os.fstat(descriptor).st_mode)
    reader_left = isinstance(error, BrokenPipeError) or (error.errno == errno.EIO and is_terminal)
    if descriptor == 1 and not reader_left:
        _write_errors.append(error)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), descriptor)


def printable(text: str) -> str:
    """Escape the control characters in a text, so that it cannot move the cursor or fake a line."""
    return _CONTROLS.sub(lambda found: _escape(ord(found[0])), text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


# Progress bars


def progress_bar(
    items: Iterable[Item] | None = None,
    *,
    desc: str,
    unit: str,
    show: bool = True,
    lines: bool = True,
    **settings: Any,
) -> tqdm[Item]:
    """A tqdm progress bar on standard error. Without a terminal, it prints a line each minute instead.

    Args:
        items: items to iterate over; None for a bar that `update` advances.
        desc: description of the work, such as `tokenizing`.
        unit: unit of the count in the plural, such as `chats`; `B` counts bytes.
        show: whether this process reports progress.
        lines: whether to print lines without a terminal.
        settings: other arguments of tqdm, such as `total`, `initial` and `leave`.
    """
    from tqdm import tqdm  # here, so that --help needs no package

    if unit == "B":
        settings |= {"unit_scale": True, "unit_divisor": 1024}
    else:
        unit = f" {unit}"
    if show and lines and not sys.stderr.isatty():
        known = items is not None and hasattr(items, "__len__") or settings.get("total") is not None
        form = "{desc}: {n_fmt}/{total_fmt}{unit}, {remaining} left" if known else "{desc}: {n_fmt}{unit}"
        settings |= {"bar_format": form, "file": _LineStream(), "delay": LINE_EVERY_S, "miniters": 1}
        settings["position"] = 0  # otherwise tqdm moves the cursor from bar to bar
        return tqdm(items, desc=desc, unit=unit, mininterval=LINE_EVERY_S, **settings)
    disable = None if show else True
    return tqdm(items, desc=desc, unit=unit, disable=disable, dynamic_ncols=True, mininterval=0.5, **settings)


class _LineStream:
    """Prints what tqdm draws as lines on standard error."""

    def write(self, text: str) -> None:
        if text := text.strip("\r\n "):
            print_line(text, sys.stderr)

    def flush(self) -> None:
        """Nothing to do, because `print_line` flushes."""


@contextmanager
def staged_progress(expected_s: Mapping[str, float]) -> Iterator[Callable[[str], None]]:
    """A bar over several stages without progress reports; each takes about `expected_s` seconds.

    Yields:
        A function to call with the name of each stage when it begins.
    """
    form = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    started: list[str] = []
    total, desc = sum(expected_s.values()), f"{next(iter(expected_s))}: "
    with progress_bar(total=total, desc=desc, unit="s", lines=False, bar_format=form) as bar:

        def begin(name: str) -> None:
            bar.update(sum(expected_s[done] for done in started[-1:]))
            bar.set_description(name)
            started.append(name)

        yield begin
        bar.update(bar.total - bar.n)


def restrict_transformers_bars() -> None:
    """Make transformers show its progress bars only on rank 0, and only if standard error is a terminal.

    transformers shows a bar for each model that it loads or saves. Download bars of huggingface_hub are not affected.
    """
    from transformers.utils import logging

    logging.set_tqdm_hook(_rank_zero_bar)


def _rank_zero_bar(factory: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    disable = None if os.environ.get("RANK", "0") == "0" else True
    return factory(*args, **{**settings, "disable": disable})


# Summaries and tables

NAME_WIDTH = 15
"""Minimum width of the names in a summary."""
NEXT = "Next: "


def print_summary(
    done: str, rows: Mapping[str, Any] | None = None, next_words: Sequence[object] = (), *, table: str = ""
) -> None:
    """Print what a command did, its results and paths, and the next command.

    Args:
        done: text of the first line, such as `Finished: my_run (sft)`.
        rows: values by name, in order; None values are skipped.
        next_words: the next command to run, if any.
        table: lines to print before the rows.
    """
    shown = {name: value for name, value in (rows or {}).items() if value is not None}
    width = max([NAME_WIDTH, *map(len, shown)])
    lines = [done, *(f"  {line}" for line in table.splitlines())]
    lines += [f"  {name:<{width}} {value}" for name, value in shown.items()]
    print_line("\n".join(lines))
    print_next([next_words])


def print_next(commands: Sequence[Sequence[object]]) -> None:
    """Print the next commands to run, one per line; empty commands are skipped."""
    typed = [shlex.join(map(str, words)) for words in commands if words]
    if typed:
        print_line(NEXT + f"\n{' ' * len(NEXT)}".join(typed))


def typed_path(path: str | Path) -> str:
    """A path as a user types it: relative inside the directory in which the command was typed, otherwise absolute.

    Paths are also absolute if a shell script was typed outside the repository, because the script changes to it.
    """
    absolute, here = Path(path).absolute(), Path.cwd()
    if caller_directory().resolve() == here and absolute.is_relative_to(here):
        relative = str(absolute.relative_to(here))
        return f"./{relative}" if relative.startswith("-") else relative  # it would be an option
    return str(absolute)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Format at least one row of cells in aligned columns, two spaces apart; all rows have the same length."""
    return "\n".join(aligned_rows(rows))


def aligned_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of `text_table`, one per row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
