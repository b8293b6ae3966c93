"""How the process of an answer is bound: what it may use, which files it has, and what it may ask of the kernel.

What each process does itself it does with all of its memory yet to be copied, so that touches as little as it can.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import sys
from dataclasses import dataclass
from typing import Any

import kernel
import seccomp

RPC, STATUS, _FIRST_FREE = 3, 4, 5
_MB = 1 << 20
_STACK_BYTES = 64 * _MB
_MOST_FILES = 64


@dataclass(frozen=True)
class Files:
    """Open files of the process that it needs."""

    program: int
    """Length of the preamble, the preamble, the program; read once, and not kept."""
    stdin: int
    stdout: int
    stderr: int
    rpc: int
    """Socket to the test; /dev/null for a program."""
    status: int
    """Pipe on which `answer.py`, and never the answer, says how compiling went."""


def prepare() -> None:
    """What is the same for all answers, done once before any is forked: it must not cost each of them its copy."""
    # 1 rather than 0, which would not keep the kernel from handing the memory to a program that collects such
    for limit, value in ((resource.RLIMIT_CORE, 1), (resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_MSGQUEUE, 0)):
        resource.setrlimit(limit, (value, value))
    resource.setrlimit(*_lowered(resource.RLIMIT_STACK, _STACK_BYTES))  # of the first thread; it grows only when used
    _open_standard_streams()
    sys.argv = ["answer.py"]


def _open_standard_streams() -> None:
    options: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape", "closefd": False}
    # typeshed calls these names final, which Python does not
    sys.stdin = sys.__stdin__ = open(0, **options)  # type: ignore[misc]
    # pipes in their place for now, since a stream keeps in mind whether it can seek
    saved, pipe = [os.dup(1), os.dup(2)], os.pipe()
    for target in (1, 2):
        os.dup2(pipe[1], target)
    sys.stdout = sys.__stdout__ = open(1, "w", **options)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, **options)  # type: ignore[misc]
    for target, fd in zip((1, 2), saved):
        os.dup2(fd, target)
    for fd in (*saved, *pipe):
        os.close(fd)


def resource_limits(limits: dict[str, Any], num_unlimited: int) -> list[tuple[int, tuple[int, int]]]:
    """What the process of an answer is to limit, and to what.

    Args:
        limits: the fields of `Limits`.
        num_unlimited: see `place.py`.
    """
    wanted = {
        resource.RLIMIT_AS: limits["memory_mb"] * _MB,
        resource.RLIMIT_CPU: int(limits["cpu_s"]) + 1,  # the soft limit is the hard one: its signal cannot be caught
        resource.RLIMIT_FSIZE: limits["file_mb"] * _MB,
        resource.RLIMIT_NOFILE: _MOST_FILES,
    }
    if num_unlimited >= 0:
        wanted[resource.RLIMIT_NPROC] = limits["num_processes"] + num_unlimited
    return [_lowered(limit, value) for limit, value in wanted.items()]


def _lowered(limit: int, value: int) -> tuple[int, tuple[int, int]]:
    highest = resource.getrlimit(limit)[1]
    value = value if highest == resource.RLIM_INFINITY else min(value, highest)
    return limit, (value, value)


def take_files(files: Files) -> None:
    """Keep these files under their numbers, and no other."""
    wanted = (files.stdin, files.stdout, files.stderr, files.rpc, files.status)
    kept = [fd if fd >= _FIRST_FREE else fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_FREE) for fd in wanted]
    for target, fd in enumerate(kept):
        os.dup2(fd, target, inheritable=target <= 2)
    os.closerange(_FIRST_FREE, 1 << 16)


def confine(policy: Any, drop_user: bool) -> None:
    """Give up every power, for good.

    Args:
        policy: see `place.py`.
        drop_user: whether it must first stop being root.
    """
    if drop_user:
        kernel.become_nobody()
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # the census may read its memory's size
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if policy is not None:
        policy()
        seccomp.OF_ANSWERS_ON_THE_HOST.install()
    seccomp.OF_ANSWERS.install()
