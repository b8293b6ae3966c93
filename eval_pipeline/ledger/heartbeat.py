"""Lets other machines know that this process lives, whatever its main thread is busy with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eval_pipeline.ledger.holder import RENEWAL_S
from eval_pipeline.ledger.ledger import Ledger
from verl_ext.console import warn
from verl_ext.errors import UserError


@contextmanager
def heartbeat(ledger: Ledger) -> Iterator[None]:
    """Within the block, a thread renews the claims of this process; hashing a large export takes longer than they last.

    Args:
        ledger: whose file the thread opens for itself.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_beat, args=(ledger.path.parent, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _beat(directory: Path, stop: threading.Event) -> None:
    has_warned = False
    while not stop.wait(RENEWAL_S):
        try:
            ledger = Ledger(directory)  # anew each time: a connection belongs to one thread, and the file may be gone
            ledger.beat()
            ledger.close()
        except UserError as error:
            if not has_warned:
                warn(f"{error}; other machines may assume that this process is dead")
            has_warned = True
