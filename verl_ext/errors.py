"""The one exception that means "the user can mend this", and the signals and exit codes that commands agree on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from verl_ext.tell import printable

USER_ERROR_EXIT_CODE = 2
STOPPED_EXIT_CODE = 75
"""EX_TEMPFAIL of <sysexits.h>: the run was asked to stop, and a scheduler may start the same command again."""
SICK_EXIT_CODE = 3
"""The run was stopped by a health rule, and somebody should look before the same command goes on."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""What asks a launcher or a rank to save and stop."""
SAME_REQUEST_S = 1.0
"""A SIGINT asks to stop immediately if another SIGINT arrived longer ago than this; other repeats change nothing."""


class UserError(Exception):
    """Bad input. The message says in one sentence what is wrong and how to mend it."""


def first_line_of(error: Exception) -> str:
    """What a library's exception says, without the pages some put behind it, the path that is told anyway, the stop."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (said.strip() or type(error).__name__).splitlines()[0].rstrip(".")


def one_line(error: BaseException) -> str:
    """Kind and message of an exception that anything may have raised, such as code of the user's own."""
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Print a `UserError` without a traceback and leave with exit code 2; every command's `main` runs inside."""
    try:
        yield
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(USER_ERROR_EXIT_CODE) from None
