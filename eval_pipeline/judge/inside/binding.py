"""How the process of an answer is bound: what it may use, which files it has, and what it may ask of the kernel.

What each process does itself it does with all of its memory yet to be copied, so that touches as little as it can.
"""

from __future__ import annotations

import _thread
import fcntl
import functools
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
    # of the first thread; it grows only when used. An answer may raise it: the limit of its memory holds for it too
    highest = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (_lowered(resource.RLIMIT_STACK, _STACK_BYTES)[1][0], highest))
    _make_limits_settable()
    _open_standard_streams()
    sys.argv = ["answer.py"]


def _make_limits_settable() -> None:
    """Replace `setrlimit`, `prlimit` and `stack_size` in this process: programs ask for unlimited stacks and the like,
    and stop with an error where they do not get them. They get the most that the kernel lets them have."""
    set_limit, set_limit_of, set_stack_size = resource.setrlimit, resource.prlimit, _thread.stack_size

    @functools.wraps(set_limit)
    def setrlimit(limit: int, values: Any, /) -> None:
        set_limit(limit, _allowed(limit, values))

    @functools.wraps(set_limit_of)
    def prlimit(pid: int, limit: int, values: Any = None, /) -> tuple[int, int]:
        pid = 0 if pid == os.getpid() else pid  # the filter of system calls knows this process by 0 alone
        return set_limit_of(pid, limit, *(() if values is None else (_allowed(limit, values),)))

    @functools.wraps(set_stack_size)
    def stack_size(size: int = 0, /) -> int:
        memory = resource.getrlimit(resource.RLIMIT_AS)[0]  # stacks count in full, however little of them is used
        most = size if memory == resource.RLIM_INFINITY else memory // 4 // _MB * _MB
        return set_stack_size(min(size, most))

    resource.setrlimit, resource.prlimit = setrlimit, prlimit
    _thread.stack_size = stack_size  # `threading` takes it from there, unless it was imported for the level before
    if "threading" in sys.modules:
        vars(sys.modules["threading"])["stack_size"] = stack_size


def _allowed(limit: int, values: Any) -> Any:
    """Soft and hard limit, neither above the hard one that holds; other values as they are, to be refused as usual."""
    highest = resource.getrlimit(limit)[1]
    if highest == resource.RLIM_INFINITY or type(values) not in (tuple, list) or {*map(type, values)} != {int}:
        return values
    return tuple(highest if value == resource.RLIM_INFINITY else min(value, highest) for value in values)


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
        limits: the fields of `ResourceLimits`.
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
