"""Processes seen from outside, and waiting for conditions. A process may end between any two looks at it."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import psutil

WAIT_S = 300.0
"""Longer than anything takes on a busy machine."""
Found = TypeVar("Found")


def wait_until(
    condition: Callable[[], Found],
    process: subprocess.Popen[Any] | None = None,
    *,
    timeout_s: float = WAIT_S,
    pause_s: float = 0.02,
) -> Found:
    """Poll a condition until it holds, and return its value.

    Args:
        condition: what is polled.
        process: must stay alive meanwhile; its output is part of the error if it does not.
        timeout_s: fails after this time.
        pause_s: time between two looks.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if process is not None and process.poll() is not None:
            if condition():  # it came true with the end
                continue
            output = process.communicate() if process.stdout or process.stderr else ""
            raise AssertionError(f"the process ended with exit code {process.returncode} too early: {output}")
        assert time.monotonic() < deadline, f"it did not come true within {timeout_s} s"
        time.sleep(pause_s)
    return found


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float = 60) -> None:
    """Wait until none of the processes is alive."""
    processes = list(processes)
    wait_until(lambda: not alive(processes), timeout_s=timeout_s)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on."""
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]


def family_of(process: psutil.Process | subprocess.Popen[Any]) -> list[psutil.Process]:
    """All descendants."""
    return children_of(process, recursive=True)


def children_of(process: psutil.Process | subprocess.Popen[Any], *, recursive: bool = False) -> list[psutil.Process]:
    """The children, and with `recursive` all descendants."""
    try:
        return psutil.Process(process.pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def words_of(process: psutil.Process) -> list[str]:
    """The command line; empty if the process has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def running(*words: str) -> list[psutil.Process]:
    """The live processes of this machine whose command line has all of these words."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if set(words) <= set(process.info["cmdline"] or ())]


def rank_of(process: psutil.Process) -> int | None:
    """The rank that torchrun gave to a process; None if it gave none."""
    try:
        rank = process.environ().get("RANK")
    except psutil.NoSuchProcess:
        return None
    return None if rank is None else int(rank)


def ranks_of(launcher: int) -> dict[int, psutil.Process]:
    """The ranks that a launcher has started, by their number."""
    numbered = {rank_of(process): process for process in psutil.Process(launcher).children()}
    return {rank: process for rank, process in numbered.items() if rank is not None}


def alive(processes: Iterable[psutil.Process]) -> list[str]:
    """Process id and command line of those that have not ended. A zombie has ended."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join([str(process.pid), *process.cmdline()])[:200])
        except psutil.NoSuchProcess:
            continue
    return found


def uv(*words: str | Path) -> None:
    """Run uv, which creates environments for tests."""
    done = subprocess.run(["uv", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
