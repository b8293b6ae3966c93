"""Runs a command and fails if it leaves processes behind: `python -m tests.helpers.subreaper COMMAND ...`.

The kernel gives every orphan below this process to it, so an orphan shows whatever it did to leave its parent: a rank
whose launcher was killed, an engine whose evaluation ended, an answer that started a new session. The exit code
is the command's, or 1 if it was 0 and processes were left. They are named and killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

import psutil

PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>
SETTLE_S = 60
"""How long orphans may take to end after the command: an engine notices the death of its owner within seconds."""


def run(command: list[str]) -> int:
    """Run the command, reap every orphan, and return the exit code."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("the kernel cannot make this process a subreaper")
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: stop(number))
    signal.signal(signal.SIGINT, lambda number, frame: None)  # Ctrl-C reaches the command as well
    code = None
    while code is None:
        pid, status = os.wait()
        if pid == child.pid:
            code = child.returncode = os.waitstatus_to_exitcode(status)
    left = orphans()
    for line in left:
        print(f"error: the tests left a process behind: {line}", file=sys.stderr)
    kill_family()
    return 1 if left and code == 0 else 128 - code if code < 0 else code


def orphans() -> list[str]:
    """Command lines of the descendants that are still alive after `SETTLE_S`."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        family = psutil.Process().children(recursive=True)
        while reap():
            pass
        if not family or time.monotonic() > deadline:
            return [" ".join([str(each.pid), *words(each)])[:300] for each in family]
        time.sleep(0.1)


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def reap() -> bool:
    """Take the exit status of a child that has ended, if there is one."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def kill_family() -> None:
    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def stop(number: int) -> None:
    """Kill all descendants and exit."""
    kill_family()
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
