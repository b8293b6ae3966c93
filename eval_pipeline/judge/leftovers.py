"""Removes what is left below a zygote without namespaces, where an answer may have killed its supervisor."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from eval_pipeline.judge.inside.census import Census
from eval_pipeline.judge.inside.directories import remove_tree

_PAUSE_S = 0.0005
_MOST_S = 10.0


def end_below(zygote: int) -> None:
    """Kill every process below a zygote, which adopts orphans and waits for none."""
    census = Census(bytearray(mmap.PAGESIZE))
    deadline = time.monotonic() + _MOST_S
    try:
        # a look at /proc is not atomic and may miss one that was just born: nothing must be seen twice in a row
        num_empty = 0
        while num_empty < 2 and time.monotonic() < deadline:
            found = census.descendants(zygote)
            num_empty = 0 if found else num_empty + 1
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_PAUSE_S)
    finally:
        os.close(census.fd)


def remove_directories(zygote: int) -> None:
    """Remove the temporary directories of a zygote's answers (`HostPlace.fresh_directory`); report what stays."""
    for directory in Path("/tmp").glob(f"judge_{zygote}_*"):
        try:
            remove_tree(str(directory))
        except OSError as error:
            print(f"warning: cannot remove {directory} of a judged answer ({error}); remove it", file=sys.stderr)
