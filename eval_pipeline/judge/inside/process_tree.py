"""What the processes of an answer use, read from /proc by a process that they cannot reach.

The server imports this module too, so it imports no sibling.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# fields of /proc/PID/stat, counted from the one after the command's name
_PARENT, _UTIME, _STIME, _CUTIME, _CSTIME, _THREADS = 1, 11, 12, 13, 14, 17


@dataclass(frozen=True)
class Usage:
    """Sums over the living descendants of a process."""

    num_tasks: int
    """Processes and threads."""
    memory_bytes: int
    """Resident pages that belong to no file; pages that processes share since a fork count in each."""
    cpu_s: float
    """Of them, and of their children that they have waited for."""


class ProcessTree:
    """The descendants of a process. The proc file system stays open although answers cannot see it.

    Args:
        page: memory for what is read of a process, which chooses its own name.

    Attributes:
        fd: of /proc, as it is now.
        counted: the descendants that `usage` found last.
    """

    def __init__(self, page: mmap.mmap | bytearray) -> None:
        self._page = page
        self.fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._own = 0
        self.counted: list[int] = []

    def find_self(self) -> None:
        """Learn this process's number in that proc file system, which may differ from `os.getpid()`."""
        self._own = int(os.readlink("self", dir_fd=self.fd))

    def descendants(self, of: int | None = None) -> dict[int, list[bytes]]:
        """The stat fields of every descendant, by its number in that file system.

        Args:
            of: a process; None takes this one.
        """
        fields = {}
        for name in os.listdir(self.fd):
            if name.isdigit() and (stat := self._stat(name)):
                fields[int(name)] = stat
        ours: dict[int, list[bytes]] = {}
        newest = {self._own if of is None else of}
        while newest:
            newest = {pid for pid, stat in fields.items() if int(stat[_PARENT]) in newest and pid not in ours}
            ours.update((pid, fields[pid]) for pid in newest)
        return ours

    def usage(self) -> Usage:
        """What all living descendants of this process use now."""
        processes = self.descendants()
        self.counted = list(processes)
        ticks = sum(int(stat[n]) for stat in processes.values() for n in (_UTIME, _STIME, _CUTIME, _CSTIME))
        num_tasks = sum(int(stat[_THREADS]) for stat in processes.values())
        return Usage(num_tasks, sum(map(self._memory, processes)), ticks * _TICK_S)

    def shared_memory(self) -> int:
        """Resident bytes of all descendants, where pages that several share count once; slower to read."""
        return sum(map(self._share_of_memory, self.descendants()))

    def deleted_bytes(self) -> int:
        """Bytes on disk of the files without a name that the counted descendants hold open."""
        sizes: dict[tuple[int, int], int] = {}
        for pid in self.counted:
            # a thread may have open files of its own, and the first one may have ended
            for task in self._names(f"{pid}/task"):
                sizes.update(self._deleted(f"{pid}/task/{task}/fd"))
        return sum(sizes.values())

    def _deleted(self, folder: str) -> Iterator[tuple[tuple[int, int], int]]:
        for name in self._names(folder):
            try:
                status = os.stat(f"{folder}/{name}", dir_fd=self.fd)
                if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                    # a sealed file from the server is not on a disk
                    if not os.readlink(f"{folder}/{name}", dir_fd=self.fd).startswith("/memfd:"):
                        yield (status.st_dev, status.st_ino), status.st_blocks * 512
            except OSError:  # closed meanwhile
                continue

    def _names(self, folder: str) -> list[str]:
        """The names in one of its directories; none if the process has ended."""
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.fd)
        except OSError:
            return []
        try:
            return os.listdir(fd)
        except OSError:
            return []
        finally:
            os.close(fd)

    def _stat(self, name: str) -> list[bytes]:
        size = self._read_into(self._page, f"{name}/stat")
        return bytes(self._page[self._page.rfind(b")", 0, size) + 2 : size]).split()

    def _share_of_memory(self, pid: int) -> int:
        lines = self._read(f"{pid}/smaps_rollup").splitlines()
        shares = [int(line.split()[1]) << 10 for line in lines if line.startswith(b"Pss:")]
        return shares[0] if shares else self._memory(pid)

    def _memory(self, pid: int) -> int:
        numbers = self._read(f"{pid}/statm").split()
        # shared pages are files: the program's own, and the temporary directory's, whose size is limited
        return (int(numbers[1]) - int(numbers[2])) * _PAGE if numbers else 0

    def _read(self, path: str) -> bytes:
        """A file that contains only numbers; empty if the process has ended."""
        data = bytearray(_PAGE)
        return bytes(data[: self._read_into(data, path)])

    def _read_into(self, memory: mmap.mmap | bytearray, path: str) -> int:
        """Returns the number of bytes; 0 if the process has ended."""
        try:
            fd = os.open(path, os.O_RDONLY, dir_fd=self.fd)
        except OSError:
            return 0
        try:
            return os.readv(fd, [memory])
        except OSError:
            return 0
        finally:
            os.close(fd)
