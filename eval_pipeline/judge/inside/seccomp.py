"""System calls that no honest answer needs, refused by a filter in the kernel.

Each refusal closes a way around the limits or the namespaces: memory that no process is charged for, sockets (AF_VSOCK
of a virtual machine ignores network namespaces), more namespaces, access to other processes. Calls that honest programs
make succeed without effect: `sigaction` for SIGCHLD, because the kernel would not add the CPU time of the children of a
process that ignores it to any readable sum, `setsockopt` for the sizes of buffers, and the like.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Mapping, Sequence

from kernel import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, prctl

# name: (x86_64, aarch64); None if the call does not exist
_REFUSED_TO_SUPERVISORS = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "socket": (41, 198),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_setup": (206, 0),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "syslog": (103, 116),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
_REFUSED_TO_ANSWERS = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "memfd_create": (319, 279),
}
# Landlock does not keep the owner of a file from changing everything but its content, wherever the file is. Programs
# that copy their own files copy modes, owners and times too, so these calls succeed without effect.
_WITHOUT_EFFECT_ON_THE_HOST = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
# Nor does it keep anybody from reading attributes. To programs that copy files, it looks as if there were none.
_UNSUPPORTED_ON_THE_HOST = {
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "getxattr": (191, 8),
    "lgetxattr": (192, 9),
    "fgetxattr": (193, 10),
    "listxattr": (194, 11),
    "llistxattr": (195, 12),
    "flistxattr": (196, 13),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "getxattrat": (464, 464),
    "listxattrat": (465, 465),
    "removexattrat": (466, 466),
    "file_getattr": (468, 468),
    "file_setattr": (469, 469),
}
# TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, FIOASYNC; others change the flags of files
_ALLOWED_IOCTLS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x5452)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE, _CLONE3, _PRLIMIT, _MMAP, _KILL = (56, 220), (435, 435), (302, 261), (9, 222), (62, 129)
_SOCKETPAIR, _SETSOCKOPT, _FCNTL, _SIGACTION = (53, 199), (54, 208), (72, 25), (13, 134)
_PRCTL, _IOCTL = (157, 167), (16, 29)
_SIGCHLD = 17
_KIND_OF_SOCKET, _STREAM, _SET_LEASE, _SET_PIPE_SIZE = 0xF, 1, 1024, 1031
_BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and those that ignore the maximum
_NEW_NAMESPACES = 0x7E020080
_MAP_SHARED_ANONYMOUS = 0x21
_X32 = 0x40000000

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16


_Calls = Mapping[str, tuple[int, int | None]]


def _filter(refused: _Calls, rules: Callable[[int], list[bytes]]) -> bytes:
    """Build a filter for this machine's processor: refused calls, then rules about others.

    Raises:
        OSError: the system call numbers of this processor are unknown.
    """
    if os.uname().machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call numbers for {os.uname().machine}")
    column, arch = _ARCHITECTURES[os.uname().machine]
    steps = [_step(_LOAD, _ARCH), _step(_EQUAL, arch, 1, 0), _step(_RETURN, _KILL_PROCESS), _step(_LOAD, _NUMBER)]
    steps += [_step(_AT_LEAST, _X32, 0, 1), _REFUSE]
    steps += _on_calls(refused, column, _REFUSE)
    return b"".join([*steps, *rules(column), _step(_RETURN, _ALLOW)])


def _on_calls(calls: _Calls, column: int, then: bytes) -> list[bytes]:
    """A step for each of these system calls."""
    return _matching([numbers[column] for numbers in calls.values()], then)


def _rules_of_supervisors(column: int) -> list[bytes]:
    # on ENOSYS, the C library falls back to clone, whose flags a filter can read
    return [_step(_EQUAL, _CLONE3[column], 0, 1), _step(_RETURN, _ERRNO | errno.ENOSYS)]


def _rules_of_answers(column: int) -> list[bytes]:
    shared = [_step(_AND, _MAP_SHARED_ANONYMOUS), _step(_EQUAL, _MAP_SHARED_ANONYMOUS, 0, 1), _REFUSE]
    return [
        *_when(_CLONE[column], 0, [_step(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _REFUSE]),
        *_when(_PRLIMIT[column], 0, [_step(_EQUAL, 0, 1, 0), _REFUSE]),  # of another process
        *_when(_KILL[column], 0, [_step(_AT_LEAST, 1 << 31, 0, 1), _REFUSE]),  # a negative number: a group, or all
        *_when(_MMAP[column], 3, shared),
        # other kinds of sockets can send to any socket that has a path
        *_when(_SOCKETPAIR[column], 1, [_step(_AND, _KIND_OF_SOCKET), _step(_EQUAL, _STREAM, 1, 0), _REFUSE]),
        # a lease delays other processes that open the file
        *_when(_FCNTL[column], 1, [_step(_EQUAL, _SET_LEASE, 0, 1), _REFUSE]),
        # no process is charged for buffers
        *_when(_FCNTL[column], 1, [_step(_EQUAL, _SET_PIPE_SIZE, 0, 1), _REFUSE]),
        *_when(_SETSOCKOPT[column], 2, _matching(_BUFFER_SIZES, _PRETEND)),
        # otherwise the supervisor could no longer see its open files
        *_when(_PRCTL[column], 0, [_step(_EQUAL, PR_SET_DUMPABLE, 0, 1), _REFUSE]),
        *_when(_SIGACTION[column], 0, [_step(_EQUAL, _SIGCHLD, 0, 5), *_PRETEND_UNLESS_QUERY]),
    ]


def _rules_on_the_host(column: int) -> list[bytes]:
    num_allowed = len(_ALLOWED_IOCTLS)
    allowed = [_step(_EQUAL, request, num_allowed - n, 0) for n, request in enumerate(_ALLOWED_IOCTLS)]
    return [
        *_on_calls(_WITHOUT_EFFECT_ON_THE_HOST, column, _PRETEND),
        *_on_calls(_UNSUPPORTED_ON_THE_HOST, column, _step(_RETURN, _ERRNO | errno.ENOTSUP)),
        *_when(_IOCTL[column], 1, [*allowed, _step(_RETURN, _ERRNO | errno.ENOTTY)]),
    ]


class Filter:
    """A filter that is prepared before the fork, so that installing it touches little memory."""

    def __init__(self, program: bytes) -> None:
        self._steps = ctypes.create_string_buffer(program, len(program))
        # struct sock_fprog
        head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(self._steps))
        self._head = ctypes.create_string_buffer(head)
        self._address = ctypes.addressof(self._head)

    def install(self) -> None:
        """Apply the filter to this process and all its children, irrevocably.

        Raises:
            OSError: this kernel has no seccomp filters.
        """
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        try:
            prctl(PR_SET_SECCOMP, 2, self._address)
        except OSError as error:
            raise OSError(error.errno, f"the kernel has no seccomp filters ({error.strerror})") from error


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _when(number: int, argument: int, steps: list[bytes]) -> list[bytes]:
    """Steps on the lower half of one argument of one system call; calls that they let through reach the next rule."""
    body = [_step(_LOAD, _ARGUMENTS + 8 * argument), *steps, _step(_LOAD, _NUMBER)]
    return [_step(_EQUAL, number, 0, len(body)), *body]


def _matching(values: Sequence[int | None], then: bytes) -> list[bytes]:
    """A step for each of these values of what was loaded last."""
    return [step for value in values if value is not None for step in (_step(_EQUAL, value, 0, 1), then)]


_REFUSE = _step(_RETURN, _ERRNO | errno.EPERM)
_PRETEND = _step(_RETURN, _ERRNO | 0)
# with a null pointer (compared in two halves) as its second argument, the call only reads the disposition
_PRETEND_UNLESS_QUERY = [
    *(_step(_LOAD, _ARGUMENTS + 8), _step(_EQUAL, 0, 0, 2)),
    *(_step(_LOAD, _ARGUMENTS + 12), _step(_EQUAL, 0, 1, 0)),
    _PRETEND,
]
# built once, before any answer runs
SUPERVISOR_FILTER = Filter(_filter(_REFUSED_TO_SUPERVISORS, _rules_of_supervisors))
"""Refuses what neither supervisors nor answers need. Installed once, before supervisors are forked."""
ANSWER_FILTER = Filter(_filter(_REFUSED_TO_ANSWERS, _rules_of_answers))
"""Installed in answers, in addition to `SUPERVISOR_FILTER`."""
HOST_ANSWER_FILTER = Filter(_filter({}, _rules_on_the_host))
"""Installed in answers that only Landlock keeps from the host's files, in addition to both."""
