"""Has the kernel end a process whose parent is gone. Standard library only."""

from __future__ import annotations

import ctypes
import signal

LAUNCHER_PID = "VERL_EXT_LAUNCHER_PID"
"""Environment variable of the ranks: the process whose children they are."""
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_LIBC = ctypes.CDLL(None)  # loaded here, because between fork and exec another thread may hold the loader's lock


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have this process receive a signal when the thread that forked it ends; may be called between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
