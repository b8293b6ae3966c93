"""The exceptions for bad input and for a stop on all ranks, and the signals and exit codes common to all commands."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from verl_ext.console import make_streams_blocking, output_error, print_line

USER_ERROR_EXIT_CODE = 2
STOPPED_EXIT_CODE = 75
"""EX_TEMPFAIL of <sysexits.h>: the run was asked to stop, and a scheduler may start the same command again."""
UNHEALTHY_EXIT_CODE = 3
"""A health rule stopped the run; look at it before you start the same command again."""
STOP_SIGNALS = (
    signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGINT, signal.SIGHUP
)  # fmt: skip
"""Signals that make a launcher or a rank save and stop; LSF and Grid Engine send SIGUSR2, the kernel SIGXCPU."""
SAME_REQUEST_S = 1.0
"""A SIGINT requests an immediate stop if an earlier SIGINT arrived more than this ago; other repeats do nothing."""


class UserError(Exception):
    """Bad input. The message says in one sentence what is wrong and how to fix it."""

    exit_code = USER_ERROR_EXIT_CODE


class TransientError(UserError):
    """Input that cannot be read at the moment, so another start may succeed, unlike for bad input."""

    exit_code = 1


class Stop(Exception):
    """All ranks agreed to stop here.

    Args:
        reason: the signal, deadline or health rule.
        exit_code: exit code of the run.
        is_urgent: whether the process may be killed soon, as after a signal.
    """

    def __init__(self, reason: str, exit_code: int = STOPPED_EXIT_CODE, is_urgent: bool = False) -> None:
        super().__init__(reason)
        self.exit_code, self.is_urgent = exit_code, is_urgent


def first_line_of(error: Exception) -> str:
    """First line of a library's message without the period; for an `OSError`, only the reason."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (said.strip() or type(error).__name__).splitlines()[0].rstrip(".")


_LACKING = ("start new thread", "launch worker thread", "allocate memory", "Resource temporarily unavailable")


def remedy_for(error: Exception, otherwise: str) -> str:
    """How to fix an error of reading a file: `otherwise`, unless this process lacks memory or threads.

    Libraries report such a lack as errors of many types, whose message names it.
    """
    if isinstance(error, MemoryError) or any(text in str(error) for text in _LACKING):
        return "raise the limits of this process, which `ulimit -a` shows"
    return otherwise


def one_line(error: BaseException) -> str:
    """Type and message of any exception, such as one raised by user code."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # its `__str__` fails
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Print a `UserError` without a traceback and exit with its code; every command's `main` runs in this context.

    Raises:
        SystemExit: with code 2, or with code 1 after a `TransientError` or if only writing to standard output failed.
    """
    try:
        if sys.stdout is None:  # the next opened file would receive the output of libraries
            raise UserError("standard output is closed; redirect it to a file or to /dev/null")
        _require_usable_interpreter()
        make_streams_blocking()
        yield
    except UserError as error:
        print_line(f"error: {error}", sys.stderr)
        raise SystemExit(error.exit_code) from None
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
        _require_output()
        raise
    _require_output()


def _require_usable_interpreter() -> None:
    if sys.flags.optimize > 1:
        raise UserError(
            "Python runs without docstrings, which transformers needs; unset PYTHONOPTIMIZE, or omit the option -OO"
        )
    has_undecoded_bytes = any("\udc80" <= character <= "\udcff" for character in "".join(sys.argv))
    if has_undecoded_bytes and sys.getfilesystemencoding() != "utf-8":
        raise UserError("the arguments contain characters that the locale cannot decode; set LC_ALL=C.UTF-8")


def _require_output() -> None:
    problem = output_error()
    if problem is not None:
        why = first_line_of(problem)
        print_line(
            f"error: standard output cannot be written ({why}); free space, or redirect it elsewhere", sys.stderr
        )
        raise SystemExit(1)
