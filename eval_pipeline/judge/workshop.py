"""The two sandboxes of a worker: in one are its answers and their supervisor, in the other their tests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from eval_pipeline.config import JudgeLimits
from eval_pipeline.judge.levels import Level, Role
from eval_pipeline.judge.runs import Runs
from eval_pipeline.judge.sandbox import SandboxError, Zygote, readable
from eval_pipeline.judge.sealed import sealed_file
from eval_pipeline.judge.tester import Tester

_MOST_ANSWERS = 300
"""Of one supervisor, or tester. It keeps nothing of them; should that ever fail, it does not add up without end."""


class Workshop:
    """Where one worker has its answers run; at most one at a time."""

    def __init__(self, level: Level) -> None:
        """Nothing starts until it is needed."""
        self._level = level
        self._zygotes: dict[Role, Zygote] = {}
        self._supervisor: socket.socket | None = None
        self._num_answers = 0
        self._tester: Tester | None = None

    @contextmanager
    def runs(self, program: str, preamble: str, limits: JudgeLimits) -> Iterator[Runs]:
        """Runs of one answer; on leaving, nothing of the answer is left.

        Raises:
            SandboxError: no supervisor can be had, or it failed on the way.
        """
        supervisor, self._supervisor = self._supervisor or self._new_supervisor(), None
        try:
            with sealed_file(_file_of(program, preamble)) as file:
                runs = Runs(supervisor, file, limits, self)
                yield runs
            self._num_answers += 1
            # one that had to stop an answer is not used again, though nothing should be left in it
            if self._level.lasting and runs.undisturbed and self._num_answers < _MOST_ANSWERS:
                self._supervisor = supervisor
        finally:
            if self._supervisor is None:
                supervisor.close()
        if self._level.once:
            self._close("answer")

    @contextmanager
    def test(self, job: dict[str, Any], answer: socket.socket) -> Iterator[Tester]:
        """A test under way against the answer behind a connection.

        Raises:
            SandboxError: no process for it can be had.
        """
        tester, self._tester = self._tester, None
        # one that has ended meanwhile can be read
        if tester is None or readable([tester], 0):
            tester = self._new_tester()
        try:
            try:
                tester.start(job, answer)
            except OSError as error:
                raise SandboxError(self._zygotes["tester"].failure()) from error
            yield tester
            if self._level.lasting and tester.is_clean and tester.num_tests < _MOST_ANSWERS:
                self._tester = tester
        finally:
            if self._tester is None:
                tester.close()

    def close(self) -> None:
        """End both sandboxes with all that is in them."""
        for process in (self._supervisor, self._tester):
            if process is not None:
                process.close()
        self._supervisor = self._tester = None
        for role in list(self._zygotes):
            self._close(role)

    def failure(self) -> str:
        """What the sandbox of the answers said last."""
        return self._zygotes["answer"].failure()

    def _new_supervisor(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._zygote("answer").fork(theirs.fileno())
        self._num_answers = 0
        return ours

    def _new_tester(self) -> Tester:
        ours, theirs = socket.socketpair()
        with theirs:
            self._zygote("tester").fork(theirs.fileno())
        return Tester(ours)

    def _zygote(self, role: Role) -> Zygote:
        if role not in self._zygotes:
            self._zygotes[role] = Zygote(self._level, role)
        return self._zygotes[role]

    def _close(self, role: Role) -> None:
        self._zygotes.pop(role).close()


def _file_of(program: str, preamble: str) -> bytes:
    """What `inside/answer.py` reads, which is not imported here."""
    first = preamble.encode(errors="surrogatepass")
    return len(first).to_bytes(8, "big") + first + program.encode(errors="surrogatepass")
