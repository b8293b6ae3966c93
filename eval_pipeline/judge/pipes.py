"""The pipes of a process that was started with some."""

from __future__ import annotations

import subprocess
from typing import IO


def pipes_of(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    """Standard input and standard output; both were asked to be pipes."""
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout
