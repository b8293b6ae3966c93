"""Compares answers with references, and long outputs with expected ones, in a process of its own that may be killed.

A parser of answers can hang, and comparing megabytes of numbers takes a second: in a thread of the server, that second
would stop the threads that judge other answers.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time

from eval_pipeline.judge.inside import frames
from eval_pipeline.judge.types import ResourceLimits, Verdict
from eval_pipeline.judge.verdicts import outputs_match

_START_S = 60.0
"""Starting may take long on a busy machine; it is not the answer's time."""
_LONG_CHARS = 1 << 15
"""Longer outputs are compared in the process; comparing shorter ones takes no longer than sending them."""
_OUTPUTS_S = 120.0
"""Time for two outputs, of which the longest take seconds."""


class Comparer:
    """Owns the process, which starts when it is first needed."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def judge(self, answer: str, reference: str, limits: ResourceLimits) -> Verdict:
        """`success` or `wrong_answer`; the latter too for an answer that no parser gets through within the limits.

        Raises:
            OSError: the process failed.
        """
        started = time.monotonic()
        reply = self._ask({"answer": answer, "reference": reference}, b"", limits.wall_s)
        wall_s = time.monotonic() - started
        if reply is None:
            return Verdict("wrong_answer", 0, 1, "the answer could not be read in time", wall_s)
        if reply["right"]:
            return Verdict("success", 1, 1, "", wall_s)
        return Verdict("wrong_answer", 0, 1, reply["message"], wall_s)

    def outputs_match(self, actual: str, expected: str, tolerance: float | None) -> bool:
        """What `checker.outputs_match` says; long outputs do not occupy this interpreter.

        Raises:
            OSError: the process failed.
        """
        actual, expected = actual.rstrip(), expected.rstrip()
        if actual == expected:
            return True
        if min(len(actual), len(expected)) < _LONG_CHARS:
            return outputs_match(actual, expected, tolerance)
        outputs = [text.encode(errors="surrogatepass") for text in (actual, expected)]
        reply = self._ask({"tolerance": tolerance, "size": len(outputs[0])}, b"".join(outputs), _OUTPUTS_S)
        if reply is None:
            raise OSError(f"two outputs could not be compared within {_OUTPUTS_S:g} s")
        return reply["right"]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, question: dict[str, object], blob: bytes, timeout_s: float) -> dict | None:
        connection = self._connection or self._start()
        connection.settimeout(timeout_s)  # sending blocks too where the process does not read
        try:
            frames.send(connection, question, blob)
            return _receive(connection)
        except TimeoutError:
            self.close()
            return None

    def _start(self) -> socket.socket:
        connection, theirs = socket.socketpair()
        self._connection = connection
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "eval_pipeline.judge.comparison_process"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
            )
        connection.settimeout(_START_S)
        try:
            _receive(connection)
        except TimeoutError as error:
            raise OSError("the process that compares answers does not start") from error
        return connection


def _receive(connection: socket.socket) -> dict:
    try:
        received = frames.receive(connection)
    except frames.FrameError as error:
        raise OSError(str(error)) from error
    if received is None:
        raise OSError("the process that compares answers ended unexpectedly")
    return received[0]
