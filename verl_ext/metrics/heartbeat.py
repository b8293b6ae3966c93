"""The heartbeat of a launcher, by which readers on any machine see whether it lives.

The launcher renews the modification time of `run.lock`. Clocks of machines differ, so a reader only asks when the time
last changed, by its own clock. Standard library only.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_ext.console import warn
from verl_ext.files import RUN_LOCK

BEAT_S = 10.0
"""Seconds between two heartbeats."""
DEAD_AFTER_S = 45.0
"""A launcher without a heartbeat for this long is dead."""
POLL_S = 0.5
_seen: dict[Path, tuple[int | None, float]] = {}
"""By run directory: the last heartbeat that this process saw, and when it saw it first."""


@contextmanager
def send_heartbeats(run_dir: Path) -> Iterator[None]:
    """Renew the heartbeat of a run directory in a thread while the block runs."""
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(run_dir / RUN_LOCK, ended), name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _beat(path: Path, ended: threading.Event) -> None:
    has_warned = False
    while not ended.is_set():
        try:
            os.utime(path)
        except OSError as error:  # it may be temporary
            if not has_warned:
                warn(f"{path} cannot be renewed ({error.strerror}); other machines may report the run as killed")
            has_warned = True
        ended.wait(BEAT_S)


def seconds_since_heartbeat(run_dir: Path) -> float | None:
    """Return for how many seconds this process has seen no heartbeat; None while the launcher may live.

    Call it repeatedly: the first call starts the time.
    """
    now, beat = time.monotonic(), _last_beat(run_dir)
    last, since = _seen.get(run_dir, (None, now))
    if beat != last:
        since = now
    _seen[run_dir] = beat, since
    return now - since if now - since > DEAD_AFTER_S else None


def await_heartbeat(run_dir: Path) -> None:
    """Wait until `seconds_since_heartbeat` can tell whether the launcher lives, unless the last heartbeat is recent."""
    beat = _last_beat(run_dir)
    if beat is not None and 0 <= time.time() - beat / 1e9 <= DEAD_AFTER_S:
        return
    while seconds_since_heartbeat(run_dir) is None and _last_beat(run_dir) == beat:
        time.sleep(POLL_S)


def _last_beat(run_dir: Path) -> int | None:
    """Return the time of the last heartbeat; None if there is none."""
    try:
        with open(run_dir / RUN_LOCK, "rb") as file:  # makes a network disk ask for the file's current attributes
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None
