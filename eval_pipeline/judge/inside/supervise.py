"""The supervisor of one answer: runs it once for each test and tells the server what was seen of it from outside."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import time
from typing import Any

import answer
import frames
import kernel
import watch
from census import Census

_MB = 1 << 20
_TAIL_CHARS = 2000


def serve(control: socket.socket, place: Any, census: Census) -> None:
    """Take the job, then run it whenever the server asks; returns when the server closes the connection."""
    # signals from inside new namespaces never reach their first process, unless it handles them
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    received = frames.receive(control)
    if received is None:
        return
    job = received[0]
    try:
        while (received := frames.receive(control, most_fds=1)) is not None:
            message, blob, fds = received
            if message["op"] != "run":
                continue  # the end of a run that had ended by itself
            report, output = _run(job, message["kind"], blob, fds, control, place, census)
            if report["reason"] == "gone":
                return
            frames.send(control, report, output)
    finally:
        place.close()


def _run(
    job: dict[str, Any], kind: str, stdin: bytes, fds: list[int], control: socket.socket, place: Any, census: Census
) -> tuple[dict[str, Any], bytes]:
    limits = job["limits"]
    most = int(limits["output_mb"] * _MB)
    directory = place.fresh_directory(limits["file_mb"])
    outer, inner = zip(*(os.pipe() for _ in range(3)))
    null = os.open(os.devnull, os.O_RDWR)
    files = answer.Files(
        stdin=_input_file(stdin) if kind == "program" else os.dup(null),
        stdout=inner[0] if kind == "program" else null,
        stderr=inner[1],
        rpc=fds[0] if fds else null,
        status=inner[2],
    )
    started, cpu_s = time.monotonic(), watch.children_cpu_s()
    pid = os.fork()
    if pid == 0:
        answer.run(job, kind, files, directory, place)
    for fd in (*inner, null, files.stdin, *fds):
        os.close(fd)
    captures = [watch.Capture(fd, size) for fd, size in zip(outer, (most, most, 1 << 16))]
    reason = watch.until_over(pid, captures, control, limits, census, place)
    wall_s = time.monotonic() - started
    status = place.end_all(pid)
    for capture in captures:
        capture.finish()
    cpu_s = watch.children_cpu_s() - cpu_s
    output, errors, compiling = captures
    report = {
        "reason": "cpu" if cpu_s > limits["cpu_s"] else reason,
        "exit": status,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "errors": errors.tail.decode(errors="replace")[-_TAIL_CHARS:],
        "compiling": json.loads(bytes(compiling.data) or b"{}"),
    }
    return report, bytes(output.data)


def _input_file(data: bytes) -> int:
    """A file with a program's input, which it can read and seek but not write."""
    fd = os.memfd_create("stdin", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd
