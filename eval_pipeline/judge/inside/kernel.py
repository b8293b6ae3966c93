"""System calls that Python has no function for."""

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
_M_ARENA_MAX, _MOST_ARENAS = -8, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
_CAPABILITIES = struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, argument: int = 0, argument2: int = 0) -> None:
    """See prctl(2); an address is an integer too.

    Raises:
        OSError: the kernel refuses.
    """
    _check(_libc.prctl(option, argument, argument2, 0, 0), f"prctl({option})")


def unshare(flags: int) -> None:
    """See unshare(2).

    Raises:
        OSError: namespaces cannot be made here.
    """
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """See setns(2).

    Raises:
        OSError: this process may not enter it.
    """
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """See mount(2).

    Raises:
        OSError: the kernel refuses.
    """
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _check(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def unmount(target: str) -> None:
    """Take the topmost mount away, even when something still uses it.

    Raises:
        OSError: nothing is mounted there.
    """
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def limit_arenas() -> None:
    """Let all threads allocate from a few pools: glibc reserves 128 MB of address space, which is limited, for each."""
    _libc.mallopt(_M_ARENA_MAX, _MOST_ARENAS)


def drop_capabilities() -> None:
    """Give up every capability; with PR_SET_NO_NEW_PRIVS no program that is run can gain one again.

    Raises:
        OSError: the kernel refuses.
    """
    _check(_libc.capset(*_CAPABILITIES), "capset")


def become_nobody() -> None:
    """Change from root to a user that owns nothing.

    Raises:
        OSError: this process may not.
    """
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
