"""A sandbox, and the process in it that forks for each piece of work."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Protocol

from eval_pipeline.judge import leftovers
from eval_pipeline.judge.gate import Gate
from eval_pipeline.judge.levels import Level, Role

STARTS = Gate()
"""Shared by sandboxes that are starting. The server exits alone in it: bubblewrap asks to be killed with its parent
before it releases the first process of the sandbox, and if it is killed in between, that process waits forever."""
_START_S = 60.0


class SandboxError(Exception):
    """The sandbox failed, not the answer."""


class Connection(Protocol):
    """Whatever can be waited for."""

    def fileno(self) -> int:
        """Its descriptor."""


class Zygote:
    """A process that forks on request."""

    def __init__(self, level: Level, role: Role) -> None:
        """Start it.

        Raises:
            SandboxError: it does not come up.
        """
        self._level, self._role = level, role
        self._log = tempfile.TemporaryFile()
        self._control, theirs = socket.socketpair()
        with STARTS.shared():
            with theirs:
                self._process = subprocess.Popen(
                    level.command(role),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=self._log,
                    env={"PYTHONHASHSEED": "0"},
                    cwd="/",
                )
            has_started = readable([self._control], _START_S) and self._control.recv(1) == b"R"
        if not has_started:
            failure = self.failure()
            self.close()
            raise SandboxError(failure)

    def fork(self, *fds: int) -> None:
        """Have it fork, handing the open files on.

        Raises:
            SandboxError: it is gone.
        """
        try:
            socket.send_fds(self._control, [b"F"], fds)
        except OSError as error:
            raise SandboxError(self.failure()) from error

    def failure(self) -> str:
        """The end of what it wrote to standard error."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 2000))
        return f"the {self._role} sandbox failed: {self._log.read().decode(errors='replace').strip()}"

    def close(self) -> None:
        """End it with all that it forked."""
        try:
            if self._level.on_host:
                leftovers.end_below(self._process.pid)
        finally:
            self._control.close()
            self._process.kill()
            self._process.wait()
            self._log.close()
        if self._level.on_host:
            leftovers.remove_directories(self._process.pid)


def readable(connections: Sequence[Connection], timeout_s: float) -> list[Connection]:
    """Those of the connections that have something to read, waiting for the first at most so long."""
    poll = select.poll()  # not `select`, which knows only the first 1024 open files
    by_fd = {connection.fileno(): connection for connection in connections}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(max(0.0, timeout_s) * 1000)]
