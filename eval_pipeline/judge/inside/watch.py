"""Watches one run of an answer: takes what it writes, and notices when it is over or at its limits."""

from __future__ import annotations

import os
import resource
import select
import socket
import time
from typing import Any

import frames
from captures import Capture
from census import Census

_FIRST_CENSUS_S = 0.02
_CENSUS_S = 0.04
_MB = 1 << 20


def children_cpu_s() -> float:
    """Seconds of processor time of all children that this process has waited for, theirs included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def until_over(
    pid: int, captures: list[Capture], control: socket.socket, limits: dict[str, Any], census: Census, place: Any
) -> str:
    """Return when a run is over, with everything of it still to be killed.

    Args:
        pid: its first process, a child of this one.
        captures: its pipes.
        control: connection on which the server may end it.
        limits: the fields of `ResourceLimits`.
        census: counts its processes and what they use.
        place: where it runs.

    Returns:
        "exited", the limit that it hit ("cpu", "wall", "memory", "processes", "files"), "ended" when the server said
        so, or "gone" when the server has gone.
    """
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    by_fd = {capture.fd: capture for capture in captures}
    for fd in (pidfd, control.fileno(), *by_fd):
        poll.register(fd, select.POLLIN)
    started = time.monotonic()
    deadline, next_census = started + limits["wall_s"], started + _FIRST_CENSUS_S
    cpu_s_before = children_cpu_s()
    try:
        while True:
            ready = [fd for fd, _ in poll.poll(max(0.0, min(deadline, next_census) - time.monotonic()) * 1000)]
            for fd in ready:
                if fd in by_fd and not by_fd[fd].read():
                    poll.unregister(fd)
            if control.fileno() in ready and frames.receive(control) is None:
                return "gone"
            if pidfd in ready:
                return "exited"
            if control.fileno() in ready:
                return "ended"
            if time.monotonic() >= deadline:
                return "wall"
            if time.monotonic() >= next_census:
                if excess := _excess(census, place, limits, children_cpu_s() - cpu_s_before):
                    return excess
                next_census = time.monotonic() + _CENSUS_S
    finally:
        os.close(pidfd)


def _excess(census: Census, place: Any, limits: dict[str, Any], waited_cpu_s: float) -> str:
    usage = census.usage()
    if usage.cpu_s + waited_cpu_s > limits["cpu_s"]:
        return "cpu"
    most_memory = limits["memory_mb"] * _MB
    if usage.memory_bytes > most_memory and (usage.num_tasks == 1 or census.shared_memory() > most_memory):
        return "memory"
    # where the kernel counts tasks it never gets here
    if usage.num_tasks > limits["num_processes"] + 1:
        return "processes"
    return "files" if place.too_large(limits["file_mb"]) else ""
