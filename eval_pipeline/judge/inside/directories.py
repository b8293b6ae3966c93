"""The temporary directory of an answer: its size, and how it is removed.

An answer can nest directories deeper than Python recurses and longer than a path may be, and can remove its own rights
to them. So every step goes from one open directory to the next, and restores the rights first. The server imports this
module too, so it imports no sibling.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from contextlib import suppress

MOST_FILES = 4096
"""Files and directories that an answer may have; an empty one costs kernel memory too."""
_RIGHTS = stat.S_IRWXU
_BLOCK = 512


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
    """A directory, opened to be read, with the rights of its owner restored.

    Raises:
        OSError: it is gone, or no directory.
    """
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        mode = stat.S_IMODE(os.fstat(found).st_mode)
        if mode & _RIGHTS != _RIGHTS:
            # through /proc, because such a descriptor has no `fchmod`, and a name may point elsewhere by now
            os.chmod(f"/proc/self/fd/{found}", mode | _RIGHTS)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=found)
    finally:
        os.close(found)


def usage(path: str) -> tuple[int, int]:
    """Number of files and directories in a directory that may change meanwhile, and the disk space of the files.

    It stops counting past `MOST_FILES`, and takes directories for as many that nest deeper than this process may have
    files open.
    """
    num_files = num_bytes = 0
    seen: set[int] = set()  # files with several names
    levels: list[tuple[int, list[str]]] = []  # from the top: the open directory, and its remaining names
    try:
        with suppress(OSError):  # an answer that may write anywhere can remove the directory itself
            _descend(path, None, levels)
        while levels and num_files <= MOST_FILES:
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
                    return MOST_FILES + 1, num_bytes
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
        names += (entry.name for entry in itertools.islice(entries, MOST_FILES + 1))
