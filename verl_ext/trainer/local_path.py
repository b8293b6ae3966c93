"""A model's directory as this machine has it, by verl's own function."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from verl.utils.fs import copy_to_local

from verl_ext.errors import UserError

SHARED_MEMORY = Path("/dev/shm/verl-cache")
"""Where verl looks for a copy and takes one that has the same names and sizes, whoever has put it there."""


def local_path(path: str, use_shm: bool) -> str:
    """A local directory or a hub name; with `use_shm` a copy in shared memory.

    Raises:
        UserError: another user could have put the copy there.
    """
    if use_shm:
        require_own(SHARED_MEMORY)
    return copy_to_local(path, use_shm=use_shm)


def require_own(directory: Path) -> None:
    """Make a directory of this user's alone where it is missing.

    Raises:
        UserError: it is there, and others may write into it.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    if not is_own:
        raise UserError(f"other users may write into {directory}; remove it, or set model.use_shm=false")
