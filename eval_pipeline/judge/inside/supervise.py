"""A supervisor: runs answers one at a time, each once for each test, and tells the server what was seen from outside.

With namespaces it serves many answers, so it never holds anything of one in memory that the next would inherit: it
hands on program and input unread, and reads output where no fork sees it (`captures.py`).
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import answer
import binding
import frames
import kernel
import watch
from captures import Captures, unforked
from census import Census
from place import HostPlace, NamespacePlace

_MB = 1 << 20


def work(fds: list[int], options: dict[str, Any], policy_for: Callable[[str], Callable[[], None]] | None) -> None:
    """Supervise for the server behind the one descriptor, where the options of the zygote say."""
    census = Census(unforked(mmap.PAGESIZE))
    if options["own_namespaces"]:
        single_use = options["single_use"]
        place = NamespacePlace(census, nested=not single_use, drop_user=single_use and options["drop_user"])
        serve(socket.socket(fileno=fds[0]), place, census)
        return
    serve(socket.socket(fileno=fds[0]), HostPlace(census, policy_for), census)


def serve(control: socket.socket, place: Any, census: Census) -> None:
    """Run an answer whenever the server asks; returns when the server closes the connection."""
    # signals from inside new namespaces never reach their first process, unless it handles them
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    captures = Captures()
    try:
        while (received := frames.receive(control, most_fds=2)) is not None:
            message, _, fds = received
            if message["op"] != "run":
                continue  # the end of a run that had ended by itself
            report, parts = _run(message, fds, captures, control, place, census)
            if report["reason"] == "gone":
                return
            frames.send_parts(control, report, parts)
    finally:
        place.close()


def _run(
    message: dict[str, Any], fds: list[int], captures: Captures, control: socket.socket, place: Any, census: Census
) -> tuple[dict[str, Any], list[memoryview]]:
    limits, is_program = message["limits"], message["kind"] == "program"
    resource_limits = binding.resource_limits(limits, place.num_unlimited)
    directory = place.fresh_directory(limits["file_mb"])
    outer, inner = zip(*(os.pipe() for _ in range(3)))
    null = os.open(os.devnull, os.O_RDWR)
    program, other = fds
    files = binding.Files(
        program=program,
        stdin=other if is_program else null,
        stdout=inner[0] if is_program else null,
        stderr=inner[1],
        rpc=null if is_program else other,
        status=inner[2],
    )
    started, cpu_s = time.monotonic(), watch.children_cpu_s()
    pid = os.fork()
    if pid == 0:
        answer.run(resource_limits, message["kind"], files, directory, place)
    for fd in (*inner, null, *fds):
        os.close(fd)
    parts = [
        captures.output(outer[0], int(limits["output_mb"] * _MB)),
        captures.errors(outer[1]),
        captures.status(outer[2]),
    ]
    reason = watch.until_over(pid, parts, control, limits, census, place)
    wall_s = time.monotonic() - started
    status = place.end_all(pid)
    if reason in ("exited", "ended") and place.too_large(limits["file_mb"]):
        reason = "files"  # whether or not anybody looked in time
    for part in parts:
        part.finish()
    cpu_s = watch.children_cpu_s() - cpu_s
    report = {
        "reason": "cpu" if cpu_s > limits["cpu_s"] else reason,
        "exit": status,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "sizes": [len(part.kept) for part in parts],
    }
    return report, [part.kept for part in parts]
