"""A reader's lease on a checkpoint, which rotation respects and which expires by itself. Standard library only."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_ext.console import warn
from verl_ext.files import LATEST, parse_json, replace_file
from verl_ext.processes import is_alive, pid_namespace

DEFAULT_SECONDS = 900.0
"""How long a lease outlives a holder that died on another machine; the holder renews it three times as often."""


@contextmanager
def hold_lease(checkpoint: Path, seconds: float = DEFAULT_SECONDS) -> Iterator[None]:
    """Keep a checkpoint from being removed while this process reads it; one lease per process and checkpoint.

    Args:
        checkpoint: an existing `global_step_N` directory.
        seconds: the lease expires this long after the last renewal; a background thread renews it until the end.

    Raises:
        OSError: no file can be written into the directory; `FileNotFoundError` if the checkpoint is gone.
    """
    path = checkpoint / f"lease.{socket.gethostname()}.{os.getpid()}.json"
    _write(path, seconds)
    ended = threading.Event()
    renewal = threading.Thread(target=_renew, args=(path, seconds, ended), daemon=True)
    renewal.start()
    try:
        yield
    finally:
        ended.set()
        renewal.join()
        _release(path)


def lease_holders(checkpoint: Path) -> list[str]:
    """The processes that read a checkpoint now, each as text such as `process 12 on host0`.

    Expired leases do not count, nor do those of a dead process of this machine. A file that cannot be read as a lease
    counts until it is older than `DEFAULT_SECONDS`.
    """
    holders = (_live_holder(path) for path in sorted(checkpoint.glob("lease.*.json")))
    return [holder for holder in holders if holder is not None]


def _write(path: Path, seconds: float) -> None:
    now = time.time()
    lease = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_namespace": pid_namespace(),
        "time": now,
        "expires": now + seconds,
    }
    replace_file(path, [json.dumps(lease) + "\n"])


def _renew(path: Path, seconds: float, ended: threading.Event) -> None:
    while not ended.wait(seconds / 3):
        try:
            _write(path, seconds)
        except OSError as error:
            warn(f"{path} could not be renewed ({error.strerror}); without it the checkpoint may be removed")


def _release(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # no reason to fail after the work is done
        warn(f"{path} could not be deleted ({error.strerror}); it expires by itself")


def _live_holder(path: Path) -> str | None:
    try:
        lease = parse_json(path.read_bytes())
        host, pid, expires = str(lease["host"]), int(lease["pid"]), float(lease["expires"])
        if not 0 <= expires < LATEST:
            raise ValueError("a lease must end")
        same_machine = host == socket.gethostname() and lease.get("pid_namespace", pid_namespace()) == pid_namespace()
    except FileNotFoundError:  # released in the meantime
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return f"{path.name}, which cannot be read" if time.time() < _mtime(path) + DEFAULT_SECONDS else None
    live = time.time() < expires and not (same_machine and not is_alive(pid))
    return f"process {pid} on {host}" if live else None


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return -math.inf
