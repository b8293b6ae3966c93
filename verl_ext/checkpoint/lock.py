"""One launch, or one removal by hand, at a time in a run directory; the kernel frees the lock when its holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from verl_ext.console import warn
from verl_ext.errors import UserError

LOCK = "run.lock"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def exclusive(run_dir: Path) -> Iterator[bool]:
    """Hold `run.lock` of the run directory, which names the holder while there is one.

    A disk that has no room for the name, or even for the file, does not prevent it: `prune` makes room there.

    Yields:
        Whether no other launch can be at work; False where the file system has no locks, see `take`.

    Raises:
        UserError: another live launch holds it, or the file cannot be written.
    """
    try:
        opened = (run_dir / LOCK).open("a+")  # "w" would empty a live holder's file
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise _refused(run_dir / LOCK, error) from error
        # there is no file, so no launch holds it
        warn(f"{run_dir / LOCK} cannot be created ({error.strerror}), so the run is not locked; start no launch there")
        yield True
        return
    with opened as file:
        locked = take(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if locked is False:
            file.seek(0)
            raise UserError(
                f"{run_dir} is in use by {file.read().strip() or 'another launch'}; wait for it, stop it, "
                "or give another trainer.experiment_name"
            )
        _name_holder(file, f"process {os.getpid()} on {socket.gethostname()}\n")
        try:
            yield locked is True
        finally:
            _name_holder(file, "")  # before the kernel frees it, so that the next holder's name is not lost


def _name_holder(file: TextIO, name: str) -> None:
    """Write who holds the lock, past the buffer of `file`; on a full disk the lock holds without a name."""
    try:
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), name.encode())
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise _refused(Path(file.name), error) from error


def _refused(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be written ({error.strerror}); make its directory writable")


def take(file: TextIO, how: int) -> bool | None:
    """Lock an open file as `fcntl.flock` does; False when another holds it and `how` says not to wait.

    Where the file system has no locks (Lustre mounted without flock, some NFS), it warns and returns None.
    """
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        warn(f"{file.name} cannot be locked on this file system ({error.strerror}); see that nobody else writes there")
        return None
    return True
