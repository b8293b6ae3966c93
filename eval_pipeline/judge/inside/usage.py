"""Measures an answer's processes and memory (from /proc) and its directory, from processes that it cannot reach.

The server imports this module too, so it imports no sibling.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

MAX_FILES = 4096
"""Files and directories that an answer may have; an empty one costs kernel memory too."""
MAX_OPEN_FILES = 64
"""Open files of each process of an answer."""
_PIPE_BYTES = 1 << 16
_BLOCK = 512
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# fields of /proc/PID/stat, counted from the one after the command's name
_STATE, _ASLEEP = 0, (b"S", b"T", b"t", b"Z", b"X")
_PARENT, _UTIME, _STIME, _CUTIME, _CSTIME, _THREADS = 1, 11, 12, 13, 14, 17


@dataclass(frozen=True)
class Usage:
    """Sums over the live descendants of a process."""

    num_tasks: int
    """Processes and threads."""
    memory_bytes: int
    """Resident pages that belong to no file; pages that processes share since a fork count for each of them."""
    cpu_s: float
    """CPU seconds of the descendants, and of their children that they have waited for."""
    is_asleep: bool
    """Whether every process and thread sleeps or is stopped, so that none waits for a processor or a disk."""


class ProcessTree:
    """The descendants of a process. The proc file system stays open although answers cannot see it.

    Args:
        page: memory for the stat file of a process, which contains a name that the process chooses.

    Attributes:
        fd: file descriptor of /proc at the time of construction.
        counted: the descendants that `usage` found last.
    """

    def __init__(self, page: mmap.mmap | bytearray) -> None:
        self._page = page
        self.fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._own = 0
        self._socket_bytes = _socket_bytes()
        self.counted: list[int] = []

    def find_self(self) -> None:
        """Find this process's id in that proc file system, which may differ from `os.getpid()`."""
        self._own = int(os.readlink("self", dir_fd=self.fd))

    def descendants(self, of: int | None = None) -> dict[int, list[bytes]]:
        """The stat fields of every descendant, by process id in that file system.

        Args:
            of: a process id; None means this process.
        """
        found = ((name, self._stat(name)) for name in os.listdir(self.fd) if name.isdigit())
        processes = {int(name): fields for name, fields in found if fields}
        ours: dict[int, list[bytes]] = {}
        newest = {self._own if of is None else of}
        while newest:
            newest = {pid for pid, fields in processes.items() if int(fields[_PARENT]) in newest and pid not in ours}
            ours.update((pid, processes[pid]) for pid in newest)
        return ours

    def usage(self) -> Usage:
        """Current resource usage of all live descendants of this process."""
        processes = self.descendants()
        self.counted = list(processes)
        ticks = sum(int(fields[n]) for fields in processes.values() for n in (_UTIME, _STIME, _CUTIME, _CSTIME))
        num_tasks = sum(int(fields[_THREADS]) for fields in processes.values())
        is_asleep = all(self._is_asleep(pid, fields) for pid, fields in processes.items())
        return Usage(num_tasks, sum(map(self._memory, processes)), ticks * _TICK_S, is_asleep)

    def shared_memory(self) -> int:
        """Resident bytes of all descendants, counting shared pages once; slower than `usage`."""
        return sum(map(self._share_of_memory, self.descendants()))

    def deleted_bytes(self) -> int:
        """Bytes on disk of deleted files that the counted descendants hold open."""
        sizes: dict[tuple[int, int], int] = {}
        for path, status in self._open_files():
            if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                with suppress(OSError):  # closed meanwhile
                    # a sealed file from the server is not on a disk
                    if not os.readlink(path, dir_fd=self.fd).startswith("/memfd:"):
                        sizes[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK
        return sum(sizes.values())

    def buffer_bytes(self) -> int:
        """Kernel memory that data in the sockets and pipes of the counted descendants can take."""
        sizes = {}
        for _, status in self._open_files():
            if stat.S_ISSOCK(status.st_mode) or stat.S_ISFIFO(status.st_mode):
                is_socket = stat.S_ISSOCK(status.st_mode)
                sizes[status.st_dev, status.st_ino] = self._socket_bytes if is_socket else _PIPE_BYTES
        return sum(sizes.values())

    def max_buffer_bytes(self, num_tasks: int) -> int:
        """The most that `buffer_bytes` can be for this number of processes and threads, without looking at any."""
        return num_tasks * MAX_OPEN_FILES * max(self._socket_bytes, _PIPE_BYTES)

    def _open_files(self) -> Iterator[tuple[str, os.stat_result]]:
        for pid in self.counted:
            # a thread may have its own table of open files, and the first thread may have ended
            for task in self._names(f"{pid}/task"):
                folder = f"{pid}/task/{task}/fd"
                for name in self._names(folder):
                    with suppress(OSError):  # closed meanwhile
                        yield f"{folder}/{name}", os.stat(f"{folder}/{name}", dir_fd=self.fd)

    def _is_asleep(self, pid: int, fields: list[bytes]) -> bool:
        if fields[_STATE] not in _ASLEEP or int(fields[_THREADS]) == 1:
            return fields[_STATE] in _ASLEEP
        threads = (self._stat(f"{pid}/task/{task}") for task in self._names(f"{pid}/task"))
        return all(thread[_STATE] in _ASLEEP for thread in threads if thread)

    def _names(self, folder: str) -> list[str]:
        """The names in a directory of /proc; empty if the process has ended."""
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
        """Read a file that contains only numbers; empty if the process has ended."""
        data = bytearray(_PAGE)
        return bytes(data[: self._read_into(data, path)])

    def _read_into(self, memory: mmap.mmap | bytearray, path: str) -> int:
        """Read a file into memory; returns the number of bytes, or 0 if the process has ended."""
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


def _socket_bytes() -> int:
    """How much data a socket buffers on its way to another."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


# The temporary directory of an answer. An answer can nest directories deeper than Python's recursion limit and the
# maximum path length, and can remove its own permissions. So every step goes from one open directory to the next, and
# restores the permissions first.


def remove_tree(path: str) -> None:
    """Remove a directory with everything in it, once no process of the answer is left.

    Raises:
        OSError: something cannot be removed.
    """
    fd = _open(path)
    names: list[str] = []
    directories = [_remove_files(fd)]
    try:
        while directories[-1] or names:
            if directories[-1]:
                names.append(directories[-1].pop())
                fd = _move_to(names[-1], fd)
                directories.append(_remove_files(fd))
            else:
                directories.pop()
                fd = _move_to("..", fd)
                os.rmdir(names.pop(), dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(path)


def _move_to(name: str, fd: int) -> int:
    found = _open(name, fd)
    os.close(fd)
    return found


def _remove_files(fd: int) -> list[str]:
    """Remove everything in a directory except directories, whose names it returns."""
    with os.scandir(fd) as scan:
        entries = list(scan)
    directories = []
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            directories.append(entry.name)
        else:
            os.unlink(entry.name, dir_fd=fd)
    return directories


def _open(name: str, parent: int | None = None) -> int:
    """Open a directory for reading, and restore its owner's permissions.

    Raises:
        OSError: it is gone, or not a directory.
    """
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        mode = stat.S_IMODE(os.fstat(found).st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            # through /proc, because such a descriptor has no `fchmod`, and a name may point elsewhere by now
            os.chmod(f"/proc/self/fd/{found}", mode | stat.S_IRWXU)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=found)
    finally:
        os.close(found)


def directory_usage(path: str) -> tuple[int, int]:
    """Number of files and directories in a directory that may change meanwhile, and the disk space of the files.

    Counting stops above `MAX_FILES`. Directories nested deeper than this process may have open files count as more.
    """
    num_files = num_bytes = 0
    seen: set[int] = set()  # files with several names
    levels: list[tuple[int, list[str]]] = []  # from the top: the open directory, and its remaining names
    try:
        with suppress(OSError):  # an answer that may write anywhere can remove the directory itself
            _descend(path, None, levels)
        while levels and num_files <= MAX_FILES:
            fd, names = levels[-1]
            if not names:
                os.close(levels.pop()[0])
                continue
            num_files += 1
            name = names.pop()
            try:
                status = os.lstat(name, dir_fd=fd)
                if stat.S_ISDIR(status.st_mode):
                    _descend(name, fd, levels)
                    continue
            except OSError as error:
                if error.errno == errno.EMFILE:
                    return MAX_FILES + 1, num_bytes
                continue  # it has disappeared
            if status.st_nlink == 1 or status.st_ino not in seen:
                seen.add(status.st_ino)
                num_bytes += status.st_blocks * _BLOCK
    finally:
        for fd, _ in levels:
            os.close(fd)
    return num_files, num_bytes


def _descend(name: str, parent: int | None, levels: list[tuple[int, list[str]]]) -> None:
    fd = _open(name, parent)
    names: list[str] = []
    levels.append((fd, names))
    with os.scandir(fd) as entries:
        names += (entry.name for entry in itertools.islice(entries, MAX_FILES + 1))
