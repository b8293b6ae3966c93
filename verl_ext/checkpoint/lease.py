"""Leases: a reader keeps rotation from removing a checkpoint. Leases expire on their own. Standard library only."""

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
from secrets import token_hex

from verl_ext.console import warn
from verl_ext.files import LATEST, parse_json, replace_file
from verl_ext.processes import boot_id, is_alive, pid_namespace

LIFETIME_S = 900.0
"""Lifetime of a lease whose holder died on another machine. Live holders renew at a third of this interval."""


@contextmanager
def hold_lease(checkpoint: Path) -> Iterator[Path | None]:
    """Protect a checkpoint from rotation while this process reads it.

    A background thread renews the lease inside the context. A checkpoint that this process can only read, such as
    another user's, gets no lease, with a warning.

    Args:
        checkpoint: an existing `global_step_N` directory.

    Yields:
        The lease; None without one.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
    """
    # unique, because containers can share a host name and process ids, and a process can hold several leases
    path = checkpoint / f"lease.{socket.gethostname()}.{os.getpid()}.{token_hex(4)}.json"
    is_held = False
    try:
        _write(path)
        is_held = True
    except FileNotFoundError:
        raise
    except OSError as error:
        warn(f"cannot protect {checkpoint} ({error.strerror}); a running training job may remove it")
    if not is_held:  # not in the handler, where errors of the block would show this one as their context
        yield None
        return
    ended = threading.Event()
    renewal = threading.Thread(target=_renew, args=(path, ended), daemon=True)
    renewal.start()
    try:
        yield path
    finally:
        ended.set()
        renewal.join()
        _release(path)


def lease_holders(checkpoint: Path, except_for: Path | None = None) -> list[str]:
    """The processes that hold a lease on a checkpoint, each as text such as `process 12 on host0`.

    Expired leases and leases of dead processes on this machine do not count. An unreadable lease file counts until it
    is older than `LIFETIME_S`.

    Args:
        except_for: a lease of the caller, which does not count.
    """
    holders = (_live_holder(path) for path in sorted(checkpoint.glob("lease.*.json")) if path != except_for)
    return [*dict.fromkeys(holder for holder in holders if holder is not None)]


def _write(path: Path) -> None:
    now = time.time()
    lease = {
        **_place(),
        "pid": os.getpid(),
        "time": now,
        "expires": now + LIFETIME_S,
    }
    replace_file(path, [json.dumps(lease) + "\n"])


def _place() -> dict[str, str | int]:
    """Where this process runs; processes with an equal place can see each other."""
    return {"host": socket.gethostname(), "boot_id": boot_id(), "pid_namespace": pid_namespace()}


def _renew(path: Path, ended: threading.Event) -> None:
    while not ended.wait(LIFETIME_S / 3):
        try:
            _write(path)
        except OSError as error:
            warn(
                f"the lease {path} could not be renewed ({error.strerror}); rotation may remove the checkpoint while "
                "it is being read"
            )


def _release(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # the work is done, so do not fail
        warn(f"{path} could not be deleted ({error.strerror}); it expires on its own")


def _live_holder(path: Path) -> str | None:
    try:
        lease = parse_json(path.read_bytes())
        host, pid, expires = str(lease["host"]), int(lease["pid"]), float(lease["expires"])
        if not 0 <= expires < LATEST:
            raise ValueError("a lease must end")
        # leases of earlier versions have fewer keys
        same_machine = all(lease.get(key, value) == value for key, value in _place().items())
    except FileNotFoundError:  # released in the meantime
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return f"{path.name}, which cannot be read" if time.time() < _mtime(path) + LIFETIME_S else None
    live = time.time() < expires and not (same_machine and not is_alive(pid))
    return f"process {pid} on {host}" if live else None


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return -math.inf
