"""One sandbox: the process in it that forks for each piece of work, and its start and end."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from eval_pipeline.judge.inside.usage import ProcessTree, remove_tree
from eval_pipeline.judge.isolation import IsolationLevel, Role


class SandboxError(Exception):
    """The sandbox failed, not the answer."""


class ReadWriteLock:
    """A readers-writer lock: many threads hold it together, or one exclusively. Exclusive holders take precedence."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._num_waiting_alone = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with others."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_waiting_alone == 0)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock alone."""
        with self._changed:
            self._num_waiting_alone += 1
            self._changed.wait_for(lambda: self._num_inside == 0)
            self._num_inside = 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside = 0
                self._num_waiting_alone -= 1
                self._changed.notify_all()


STARTS = ReadWriteLock()
"""Shared by starting sandboxes; the server exits only while it holds the lock exclusively. bubblewrap asks to be killed
with its parent before it releases the sandbox's first process. If it is killed in between, that process waits forever.
"""
_START_S = 60.0


class Zygote:
    """A process in a sandbox that forks on request.

    Raises:
        SandboxError: the process does not start.
    """

    def __init__(self, level: IsolationLevel, role: Role) -> None:
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

    def fork(self) -> socket.socket:
        """Fork; returns a connection to the new process.

        Raises:
            SandboxError: the sandbox has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"F"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise SandboxError(self.failure()) from error
        return ours

    def failure(self) -> str:
        """The last line of its standard error, which is the exception if it is a traceback."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 2000))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"the {self._role} sandbox failed: {lines[-1] if lines else 'it ended without an error message'}"

    def close(self) -> None:
        """End the process and everything that it forked."""
        try:
            if self._level.on_host:
                _end_below(self._process.pid)
        finally:
            self._control.close()
            self._process.kill()
            self._process.wait()
            self._log.close()
        if self._level.on_host:
            remove_directories(self._process.pid)


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


def readable(connections: Sequence[_HasFileno], timeout_s: float) -> list[_HasFileno]:
    """Wait up to `timeout_s` until at least one connection is readable; returns all readable ones."""
    poll = select.poll()  # not `select`, which supports only file descriptors below 1024
    by_fd = {connection.fileno(): connection for connection in connections}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(max(0.0, timeout_s) * 1000)]


# Sealed files, which carry texts past the memory of a process that later answers inherit

_NOT_EXECUTABLE = 8  # MFD_NOEXEC_SEAL, which some machines require
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@contextmanager
def sealed_file(data: bytes) -> Iterator[int]:
    """An unnamed file with immutable content, open at its beginning."""
    fd = _create_unnamed()
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        yield fd
    finally:
        os.close(fd)


def _create_unnamed() -> int:
    flags = os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC
    try:
        return os.memfd_create("judge", flags | _NOT_EXECUTABLE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("judge", flags)  # a kernel before 6.3


# Clean-up below a zygote without namespaces, where an answer may have killed its supervisor

_PAUSE_S = 0.0005
_MAX_CLEANUP_S = 10.0


def _end_below(zygote: int) -> None:
    """Kill every process below a zygote, which adopts orphans and does not wait for them."""
    tree = ProcessTree(bytearray(mmap.PAGESIZE))
    deadline = time.monotonic() + _MAX_CLEANUP_S
    try:
        # reading /proc is not atomic and may miss a new process, so two consecutive readings must find none
        num_empty = 0
        while num_empty < 2 and time.monotonic() < deadline:
            found = tree.descendants(zygote)
            num_empty = 0 if found else num_empty + 1
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_PAUSE_S)
    finally:
        os.close(tree.fd)


def remove_directories(zygote: int) -> None:
    """Remove the temporary directories of a zygote's answers, and report those that cannot be removed."""
    for directory in Path("/tmp").glob(f"judge_{zygote}_*"):
        try:
            remove_tree(str(directory))
        except OSError as error:
            print(f"warning: cannot remove {directory}, an answer's directory ({error}); remove it", file=sys.stderr)
