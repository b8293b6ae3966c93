"""Processor time of everything that this process starts, whoever waits for it in the end."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

from verl_ext.errors import UserError

_SYSTEM_CALLS = {"x86_64": 298, "aarch64": 241}
_SOFTWARE, _TASK_CLOCK = 1, 1
_INHERIT, _EXCLUDE_KERNEL = 1 << 1, 1 << 5
_CLOSE_ON_EXEC = 8
_ATTRIBUTE = struct.Struct("=IIQ24xQ80x")


class ProcessorTime:
    """A clock that runs while this thread, or any thread or process begun by it or by those, has a processor.

    The kernel's task clock (`perf_event_open`, see its manual page). `getrusage` misses orphans and children of
    processes that ignore SIGCHLD, and a judge has both. What the kernel does for a process counts too: the task clock
    has one speed for all, and `exclude_kernel` only makes it open to every user.
    """

    def __init__(self) -> None:
        """Start the clock.

        Raises:
            UserError: the kernel has no such clock for this user.
        """
        attribute = ctypes.create_string_buffer(
            _ATTRIBUTE.pack(_SOFTWARE, _ATTRIBUTE.size, _TASK_CLOCK, _INHERIT | _EXCLUDE_KERNEL), _ATTRIBUTE.size
        )
        number = _SYSTEM_CALLS.get(platform.machine())
        if number is None:
            raise UserError(f"processor time is not counted on {platform.machine()}; run this on x86_64 or aarch64")
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.syscall(number, attribute, 0, -1, -1, _CLOSE_ON_EXEC)
        if self._fd < 0:
            raise UserError(
                f"the kernel does not count processor time for this user ({os.strerror(ctypes.get_errno())}); set the"
                " sysctl kernel.perf_event_paranoid to 2, and let a container's seccomp profile pass perf_event_open"
            )

    def seconds(self) -> float:
        """What the clock shows."""
        return struct.unpack("Q", os.read(self._fd, 8))[0] / 1e9
