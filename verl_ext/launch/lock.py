"""One launch at a time in a run directory; the kernel frees the lock when its holder dies."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_ext.errors import UserError


@contextmanager
def exclusive(run_dir: Path) -> Iterator[None]:
    """Hold `run.lock` of the run directory, which names the holder.

    Raises:
        UserError: another live launch holds it.
    """
    with (run_dir / "run.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{run_dir} is in use by {file.read().strip() or 'another launch'}; wait for it, stop it, "
                "or give another trainer.experiment_name"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
