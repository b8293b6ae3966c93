"""The runs of one answer, as the server asks its supervisor for them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from typing import Any, Protocol

from eval_pipeline.config import JudgeLimits
from eval_pipeline.judge.inside import frames
from eval_pipeline.judge.sandbox import SandboxError, readable
from eval_pipeline.judge.sealed import sealed_file
from eval_pipeline.judge.tester import Tester

_LOST_S = 1.0
"""Time for an answer that its test has lost to end by itself, so that its exit status tells why."""
_EXTRA_TEST_S = 5.0
"""Past the wall-clock limit of its answer, whose end makes a test end by itself, the kernel ends a test that hangs."""
_GRACE_S = 15.0
"""Past the wall-clock limit, which the supervisor watches: it is taken for broken then."""
_ERROR_CHARS = 2000
_NUMBERS = {"exit": int, "cpu_s": float, "wall_s": float}
_UNDISTURBED = ("exited", "ended")
_REASONS = (*_UNDISTURBED, "cpu", "wall", "memory", "processes", "files")


class Place(Protocol):
    """Where the runs take place (`workshop.py`)."""

    def test(self, job: dict[str, Any], answer: socket.socket) -> AbstractContextManager[Tester]:
        """A test under way against the answer behind a connection."""

    def failure(self) -> str:
        """What the sandbox of the answers said last."""


class Runs:
    """Has one answer run once for each of its tests."""

    def __init__(self, supervisor: socket.socket, file: int, limits: JudgeLimits, place: Place) -> None:
        """Talk to a supervisor about the answer in a sealed file."""
        self._supervisor = supervisor
        self._file = file
        self._limits = limits
        self._place = place
        self.undisturbed = True
        """Whether every run has ended by itself, or because its test had ended."""

    def run_program(self, stdin: bytes) -> tuple[dict[str, Any], bytes]:
        """Run the answer as a program; returns what was seen of it (`inside/supervise.py`), and its output.

        Raises:
            SandboxError: the supervisor broke.
        """
        with sealed_file(stdin) as input_file:
            self._start("program", input_file)
        return self._report(self._deadline())

    def run_function_test(self, preamble: str, entry_point: str, test: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Run a test against the answer; returns what was seen of the answer, and the outcome of the test.

        Raises:
            SandboxError: a sandbox broke.
        """
        answers_end, testers_end = socket.socketpair()
        limits = {
            **asdict(self._limits),
            "test_cpu_s": self._limits.test_cpu_s,
            "test_wall_s": self._limits.wall_s + _EXTRA_TEST_S,
        }
        job = {"preamble": preamble, "entry_point": entry_point, "test": test, "limits": limits}
        with testers_end:
            with answers_end:
                self._start("function", answers_end.fileno())
            return self._finish_test(job, testers_end)

    def _finish_test(self, job: dict[str, Any], testers_end: socket.socket) -> tuple[dict[str, Any], dict[str, str]]:
        with self._place.test(job, testers_end) as tester:
            testers_end.close()
            deadline = self._deadline()
            ready = readable([tester, self._supervisor], deadline - time.monotonic())
            if self._supervisor in ready:
                # the answer has ended; its test notices, and may just have come to its end itself
                return self._report(deadline)[0], tester.outcome(deadline)
            outcome = tester.outcome(deadline)
            if outcome["outcome"] != "lost" or not readable([self._supervisor], _LOST_S):
                self._send({"op": "end"})
            return self._report(deadline)[0], outcome

    def _deadline(self) -> float:
        return time.monotonic() + self._limits.wall_s + _GRACE_S

    def _start(self, kind: str, fd: int) -> None:
        self._send({"op": "run", "kind": kind, "limits": asdict(self._limits)}, (self._file, fd))

    def _send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        try:
            frames.send(self._supervisor, message, fds=fds)
        except OSError as error:
            raise SandboxError(self._place.failure()) from error

    def _report(self, deadline: float) -> tuple[dict[str, Any], bytes]:
        if not readable([self._supervisor], deadline - time.monotonic()):
            raise SandboxError("the supervisor of the answer does not reply")
        with suppress(frames.FrameError):
            if (received := frames.receive(self._supervisor)) is not None:
                report, output = _read_report(*received[:2])
                self.undisturbed &= report["reason"] in _UNDISTURBED
                return report, output
        raise SandboxError(self._place.failure())


def _read_report(report: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
    """A supervisor's report with the texts that came beside it, and the answer's output.

    Raises:
        SandboxError: it is not well-formed, or the answer could not be started.
    """
    try:
        well_formed = report["reason"] in _REASONS and all(type(report[n]) is kind for n, kind in _NUMBERS.items())
        output, errors, status = _cut(blob, report["sizes"])
        compiling = json.loads(status or b"{}")
    except (KeyError, TypeError, ValueError) as error:
        raise SandboxError(f"the supervisor of the answer does not reply as it should: {error!r}") from error
    if not well_formed or type(compiling) is not dict:
        raise SandboxError(f"the supervisor of the answer does not reply as it should: {report}")
    if "failed" in compiling:
        raise SandboxError(compiling["failed"])
    return {**report, "errors": errors.decode(errors="replace")[-_ERROR_CHARS:], "compiling": compiling}, output


def _cut(blob: bytes, sizes: Sequence[int]) -> list[bytes]:
    """The parts of these sizes.

    Raises:
        ValueError: they are not the whole.
    """
    if sum(sizes) != len(blob) or min(sizes) < 0:
        raise ValueError(f"{sizes} of {len(blob)} bytes")
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [blob[end - size : end] for size, end in zip(sizes, ends)]
