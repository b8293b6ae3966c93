"""Confines the process of an answer: its resource limits, its open files, and its system calls.

After the fork, every page that the process touches must be copied, so the code that runs there touches little memory.
"""

from __future__ import annotations

import _thread
import errno
import fcntl
import functools
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kernel
import seccomp
from usage import MAX_OPEN_FILES

RPC, STATUS, _FIRST_FREE = 3, 4, 5
_MB = 1 << 20
_STACK_BYTES = 64 * _MB


@dataclass(frozen=True)
class Files:
    """The open files that the process needs."""

    program: int
    """Preamble and program (`protocol.read_program`); closed after it is read."""
    stdin: int
    stdout: int
    stderr: int
    rpc: int
    """Socket to the test; /dev/null for a program."""
    status: int
    """Pipe on which `answer.py`, and never the answer itself, reports the result of compiling."""


def prepare() -> None:
    """Do once, before the first fork, what is the same for all answers, so that no fork copies memory for it."""
    # with a limit of 0, the kernel would still pipe the memory to a program that collects core dumps
    for limit, value in ((resource.RLIMIT_CORE, 1), (resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_MSGQUEUE, 0)):
        resource.setrlimit(limit, (value, value))
    # The first thread's stack, which grows only when used. Answers may raise it: the memory limit covers the stack too.
    highest = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (_lowered(resource.RLIMIT_STACK, _STACK_BYTES)[1][0], highest))
    _make_limits_settable()
    _open_standard_streams()
    sys.argv = ["answer.py"]


def _make_limits_settable() -> None:
    """Replace `setrlimit`, `prlimit` and `stack_size` with versions that clip values to the allowed maximum.

    Programs ask for unlimited stacks and the like, and should not fail for that.
    """
    set_limit, set_limit_of, set_stack_size = resource.setrlimit, resource.prlimit, _thread.stack_size

    @functools.wraps(set_limit)
    def setrlimit(limit: int, values: Any, /) -> None:
        set_limit(limit, _allowed(limit, values))

    @functools.wraps(set_limit_of)
    def prlimit(pid: int, limit: int, values: Any = None, /) -> tuple[int, int]:
        pid = 0 if pid == os.getpid() else pid  # the seccomp filter knows this process as 0 only
        return set_limit_of(pid, limit, *(() if values is None else (_allowed(limit, values),)))

    @functools.wraps(set_stack_size)
    def stack_size(size: int = 0, /) -> int:
        memory = resource.getrlimit(resource.RLIMIT_AS)[0]  # stacks count in full, used or not
        max_size = size if memory == resource.RLIM_INFINITY else memory // 4 // _MB * _MB
        return set_stack_size(min(size, max_size))

    resource.setrlimit, resource.prlimit = setrlimit, prlimit
    _thread.stack_size = stack_size  # `threading` imports it from here
    if "threading" in sys.modules:
        vars(sys.modules["threading"])["stack_size"] = stack_size


def _allowed(limit: int, values: Any) -> Any:
    """Clip soft and hard limit to the current hard limit; invalid values stay unchanged, to be refused as usual."""
    highest = resource.getrlimit(limit)[1]
    if highest == resource.RLIM_INFINITY or type(values) not in (tuple, list) or {*map(type, values)} != {int}:
        return values
    return tuple(highest if value == resource.RLIM_INFINITY else min(value, highest) for value in values)


def _open_standard_streams() -> None:
    options: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape", "closefd": False}
    # final in typeshed, but not in Python
    sys.stdin = sys.__stdin__ = open(0, **options)  # type: ignore[misc]
    # open them on pipes first, because a stream remembers whether it can seek
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
    """The limits of the process of an answer.

    Args:
        limits: the fields of `ResourceLimits`.
        num_unlimited: see `jail.py`.
    """
    wanted = {
        resource.RLIMIT_AS: limits["memory_mb"] * _MB,
        resource.RLIMIT_CPU: int(limits["cpu_s"]) + 1,  # soft and hard limit are equal, so the signal cannot be caught
        resource.RLIMIT_FSIZE: limits["file_mb"] * _MB,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
    }
    if num_unlimited >= 0:
        wanted[resource.RLIMIT_NPROC] = limits["num_processes"] + num_unlimited
    return [_lowered(limit, value) for limit, value in wanted.items()]


def _lowered(limit: int, value: int) -> tuple[int, tuple[int, int]]:
    highest = resource.getrlimit(limit)[1]
    value = value if highest == resource.RLIM_INFINITY else min(value, highest)
    return limit, (value, value)


def take_files(files: Files) -> None:
    """Move these files to their fixed descriptors, and close all others."""
    wanted = (files.stdin, files.stdout, files.stderr, files.rpc, files.status)
    kept = [fd if fd >= _FIRST_FREE else fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_FREE) for fd in wanted]
    for target, fd in enumerate(kept):
        os.dup2(fd, target, inheritable=target <= 2)
    os.closerange(_FIRST_FREE, 1 << 16)


def confine(policy: Any, drop_user: bool) -> None:
    """Drop all privileges, for good.

    Args:
        policy: see `jail.py`.
        drop_user: whether the process must first stop being root.
    """
    if drop_user:
        kernel.become_nobody()
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # so that the supervisor can read the size of its memory
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if policy is not None:
        policy()
        seccomp.HOST_ANSWER_FILTER.install()
    seccomp.ANSWER_FILTER.install()


# Landlock, for the level `sandlock`

_READABLE_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
_READABLE_DEVICES = ("/dev/urandom", "/dev/random")


def landlock_policy(site_packages: str, package_paths: list[str]) -> Callable[[str], Callable[[], None]]:
    """A function from a directory to its confinement, which is called in the process that it confines.

    Answers may read what Python needs, write their directory, and nothing else.

    Args:
        site_packages: folder where the package sandlock is installed.
        package_paths: files and folders that answers may read in addition to the system and Python.

    Raises:
        OSError: the kernel's Landlock is missing or too old.
    """
    sys.path.append(site_packages)
    import sandlock

    sys.path.remove(site_packages)
    version, needed = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
    if version < needed:
        has = "no Landlock" if version < 1 else f"version {version} of Landlock"
        raise OSError(errno.ENOSYS, f"the kernel has {has}, but sandlock needs version {needed}")
    wanted = (*_READABLE_SYSTEM, *_READABLE_DEVICES, sys.base_prefix, sys.base_exec_prefix, *package_paths)
    readable = [path for path in wanted if os.path.exists(path)]

    def policy_for(directory: str) -> Callable[[], None]:
        policy = sandlock.Sandbox(fs_readable=readable, fs_writable=[directory, "/dev/null"])
        return lambda: sandlock.confine(policy)

    return policy_for
