"""The two processes of a worker that fork: one for supervisors of answers, one for testers, each in its sandbox."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from eval_pipeline.judge import leftovers
from eval_pipeline.judge.inside import frames
from eval_pipeline.judge.levels import Level, Role
from eval_pipeline.judge.limits import Limits

_START_S = 60.0
_LOST_S = 1.0
"""Time for an answer that its test has lost to end by itself, so that its exit status tells why."""
_GRACE_S = 15.0
"""Past the wall-clock limit, which the supervisor watches: it is taken for broken then."""


class SandboxError(Exception):
    """The sandbox failed, not the answer."""


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
        with theirs:
            self._process = subprocess.Popen(
                level.command(role),
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env={"PYTHONHASHSEED": "0"},
                cwd="/",
            )
        if not _readable([self._control], _START_S) or self._control.recv(1) != b"R":
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
        if self._level.on_host:
            leftovers.end_below(self._process.pid)
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._log.close()
        if self._level.on_host:
            leftovers.remove_directories(self._process.pid)


def _readable(connections: list[socket.socket], timeout_s: float) -> list[socket.socket]:
    return select.select(connections, [], [], max(0.0, timeout_s))[0]


class Workshop:
    """Where one worker has its answers run; at most one at a time."""

    def __init__(self, level: Level) -> None:
        """Nothing starts until it is needed."""
        self._level = level
        self._zygotes: dict[Role, Zygote] = {}

    @contextmanager
    def supervisor(self, program: str, preamble: str, limits: Limits) -> Iterator[Supervisor]:
        """A supervisor for one answer; on leaving, nothing of the answer is left.

        Raises:
            SandboxError: it cannot be had, or failed on the way.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._zygote("answer").fork(theirs.fileno())
            frames.send(ours, {"program": program, "preamble": preamble, "limits": asdict(limits)})
            yield Supervisor(ours, limits, self)
        if self._level.once:
            self._close("answer")

    def start_test(self, job: dict[str, Any], connection: socket.socket) -> socket.socket:
        """Have a test run against the answer behind a connection; returns where its outcome will be read.

        Raises:
            SandboxError: no process for it can be had.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._zygote("tester").fork(theirs.fileno(), connection.fileno())
        frames.send(ours, job)
        return ours

    def close(self) -> None:
        """End both sandboxes with all that is in them."""
        for role in list(self._zygotes):
            self._close(role)

    def _zygote(self, role: Role) -> Zygote:
        if role not in self._zygotes:
            self._zygotes[role] = Zygote(self._level, role)
        return self._zygotes[role]

    def _close(self, role: Role) -> None:
        self._zygotes.pop(role).close()

    def failure(self) -> str:
        """What the sandbox of the answers said last."""
        return self._zygotes["answer"].failure()


class Supervisor:
    """The server's connection to the supervisor of one answer."""

    def __init__(self, control: socket.socket, limits: Limits, workshop: Workshop) -> None:
        """Talk over `control`."""
        self._control = control
        self._limits = limits
        self._workshop = workshop

    def run_program(self, stdin: bytes) -> tuple[dict[str, Any], bytes]:
        """Run the answer as a program; returns what was seen of it (`inside/supervise.py`), and its output.

        Raises:
            SandboxError: the supervisor broke.
        """
        self._send({"op": "run", "kind": "program"}, stdin)
        return self._report(self._deadline())

    def run_function_test(self, preamble: str, entry_point: str, test: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Run a test against the answer; returns what was seen of the answer, and the outcome of the test.

        Raises:
            SandboxError: a sandbox broke.
        """
        answers_end, testers_end = socket.socketpair()
        job = {"preamble": preamble, "entry_point": entry_point, "test": test, "limits": asdict(self._limits)}
        with answers_end, testers_end:
            self._send({"op": "run", "kind": "function"}, b"", (answers_end.fileno(),))
            tester = self._workshop.start_test(job, testers_end)
        with tester:
            deadline = self._deadline()
            ready = _readable([tester, self._control], deadline - time.monotonic())
            if self._control in ready:
                # the answer has ended; its test notices, and may just have come to its end itself
                return self._report(deadline)[0], _outcome(tester, deadline)
            outcome = _outcome(tester, deadline)
            if outcome["outcome"] != "lost" or not _readable([self._control], _LOST_S):
                self._send({"op": "end"}, b"")
            return self._report(deadline)[0], outcome

    def _deadline(self) -> float:
        return time.monotonic() + self._limits.wall_s + _GRACE_S

    def _send(self, message: dict[str, Any], blob: bytes, fds: tuple[int, ...] = ()) -> None:
        try:
            frames.send(self._control, message, blob, fds)
        except OSError as error:
            raise SandboxError(self._workshop.failure()) from error

    def _report(self, deadline: float) -> tuple[dict[str, Any], bytes]:
        if not _readable([self._control], deadline - time.monotonic()):
            raise SandboxError("the supervisor of the answer does not reply")
        with suppress(frames.FrameError):
            if (received := frames.receive(self._control)) is not None:
                if "failed" in received[0]["compiling"]:
                    raise SandboxError(received[0]["compiling"]["failed"])
                return received[0], received[1]
        raise SandboxError(self._workshop.failure())


def _outcome(tester: socket.socket, deadline: float) -> dict[str, str]:
    """What the test came to; without a word from it, "died"."""
    if _readable([tester], deadline - time.monotonic()):
        with suppress(frames.FrameError):
            if (received := frames.receive(tester)) is not None:
                return received[0]
    return {"outcome": "died", "message": "the test could not be finished with what the answer returned"}
