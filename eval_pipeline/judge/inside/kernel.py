"""System calls for which Python has no function, and namespaces, which need no privilege inside a worker's sandbox.

Every function that makes a system call raises an `OSError` if the kernel refuses it.
"""

from __future__ import annotations

import ctypes
import os
import struct

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND = 1, 2, 4, 4096
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000

NOBODY = 65534
_CAPABILITY_VERSION_3 = 0x20080522
_M_ARENA_MAX, _MAX_ARENAS = -8, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
_CAPABILITIES = struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, argument: int, argument2: int = 0) -> None:
    """Call prctl(2), with addresses as integers. Raises OSError, as do the other calls here."""
    _check(_libc.prctl(option, argument, argument2, 0, 0), f"prctl({option})")


def pidfd_open(pid: int) -> int:
    """A file descriptor of a process, which is readable once the process has ended."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise OSError(error.errno, f"pidfd_open: {error.strerror}") from error


def unshare(flags: int) -> None:
    """Move the calling process to new namespaces of the kinds in `flags`, `CLONE_…`."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Move the calling process to the namespace of an open file; `kind` is its `CLONE_…`."""
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system of a kind, or change an existing mount; `flags` are `MS_…`."""
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _check(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def unmount(target: str) -> None:
    """Remove the topmost mount, even if something still uses it."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def limit_arenas() -> None:
    """Let all threads allocate from a few pools, because glibc reserves 128 MB of address space for each pool."""
    _libc.mallopt(_M_ARENA_MAX, _MAX_ARENAS)


def drop_capabilities() -> None:
    """Drop every capability. With PR_SET_NO_NEW_PRIVS, running a program cannot regain one."""
    _check(_libc.capset(*_CAPABILITIES), "capset")


def become_nobody() -> None:
    """Change from root to a user that owns nothing."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


# Namespaces

_SCRATCH = ("/tmp", "/dev/shm")
_PRIVATE = MS_NOSUID | MS_NODEV


class PidNamespaceForker:
    """Forks processes, each of which is the first one of a new process namespace.

    The constructor returns in a child that may create namespaces; the calling process waits for it and ends with it.
    """

    def __init__(self) -> None:
        user, group = os.getuid(), os.getgid()
        unshare(CLONE_NEWUSER | CLONE_NEWPID)
        _map_user(user, group)
        if (pid := os.fork()) != 0:
            os.closerange(0, 1 << 16)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def fork(self) -> int:
        """Like `os.fork`, but the child is the first process of a new namespace."""
        unshare(CLONE_NEWPID)
        pid = os.fork()
        if pid != 0:
            setns(self._own, CLONE_NEWPID)
        return pid


def enter_namespaces() -> None:
    """Put this process into new namespaces, with every capability inside them and none outside."""
    user, group = os.getuid(), os.getgid()
    # no network namespace, because the outer one has no network and contains one answer at a time
    unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS)
    _map_user(user, group)


def _map_user(user: int, group: int) -> None:
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def mount_scratch(file_mb: int, max_files: int) -> None:
    """Hide /proc and everything that could hold memory beyond the limits, and mount empty temporary directories."""
    mount("none", "/proc", "tmpfs", MS_RDONLY | _PRIVATE, "size=4k,mode=555")
    # an unmapped shared mapping of /dev/zero is memory that no process is charged for
    mount("/dev/null", "/dev/zero", None, MS_BIND)
    for directory in _SCRATCH:
        _mount_empty(directory, file_mb, max_files)


def remount_scratch(file_mb: int, max_files: int) -> None:
    """Replace the temporary directories with empty ones."""
    for directory in _SCRATCH:
        unmount(directory)
        _mount_empty(directory, file_mb, max_files)


def _mount_empty(directory: str, file_mb: int, max_files: int) -> None:
    options = f"size={file_mb}m,nr_inodes={max_files},mode=1777"
    mount("none", directory, "tmpfs", _PRIVATE, options)
