"""Namespaces of one supervisor's own, made without any privilege inside the sandbox of its worker."""

from __future__ import annotations

import os

import directories
import kernel

_SCRATCH = ("/tmp", "/dev/shm")
_PRIVATE = kernel.MS_NOSUID | kernel.MS_NODEV


class Nursery:
    """Forks processes that are each the first one of a new process namespace."""

    def __init__(self) -> None:
        """Return in a child that may make namespaces; this process waits for its end and ends too.

        Raises:
            OSError: namespaces cannot be made here.
        """
        user, group = os.getuid(), os.getgid()
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID)
        _map_user(user, group)
        if (pid := os.fork()) != 0:
            os.closerange(0, 1 << 16)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def fork(self) -> int:
        """Like `os.fork`, but the child is the first process of a new namespace."""
        kernel.unshare(kernel.CLONE_NEWPID)
        pid = os.fork()
        if pid != 0:
            kernel.setns(self._own, kernel.CLONE_NEWPID)
        return pid


def enter() -> None:
    """Put this process into new namespaces, with every capability in them and none outside.

    Raises:
        OSError: namespaces cannot be made here.
    """
    user, group = os.getuid(), os.getgid()
    # no network namespace: the outer one has no network, and holds one answer at a time
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS)
    _map_user(user, group)


def _map_user(user: int, group: int) -> None:
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def furnish(file_mb: int) -> None:
    """Hide /proc and everything that could hold memory beyond the limits, and mount empty temporary directories."""
    kernel.mount("none", "/proc", "tmpfs", kernel.MS_RDONLY | _PRIVATE, "size=4k,mode=555")
    # a shared mapping of /dev/zero is memory that no process is charged with once it is unmapped
    kernel.mount("/dev/null", "/dev/zero", None, kernel.MS_BIND)
    for directory in _SCRATCH:
        _mount_scratch(directory, file_mb)


def refurnish(file_mb: int) -> None:
    """Replace the temporary directories by empty ones."""
    for directory in _SCRATCH:
        kernel.unmount(directory)
        _mount_scratch(directory, file_mb)


def _mount_scratch(directory: str, file_mb: int) -> None:
    options = f"size={file_mb}m,nr_inodes={directories.MOST_FILES},mode=1777"
    kernel.mount("none", directory, "tmpfs", _PRIVATE, options)
