"""Compares answers with references, scores them, and compares long outputs, in a process that can be killed.

A parser of answers or a scorer can hang. Comparing megabytes of numbers takes a second, during which a thread of the
server would block the threads that judge other answers. This file contains both the process and its client. No code of
an answer runs here.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any

from eval_pipeline.judge.formula_values import NotAFormula
from eval_pipeline.judge.inside import protocol
from eval_pipeline.judge.numeric_answer import is_right, stated_result
from eval_pipeline.judge.scorers import score
from eval_pipeline.judge.types import ResourceLimits, ScoredAnswer, Verdict
from eval_pipeline.judge.verdicts import outputs_match
from verl_ext.cli import child_process_args
from verl_ext.commands import program
from verl_ext.processes import end_with_parent

_START_S = 60.0
"""Time limit of the start, which may be slow on a busy machine and does not count as the answer's time."""
_LONG_CHARS = 1 << 15
"""Longer outputs are compared in the process; comparing shorter ones takes no longer than sending them."""
_SHOWN_CHARS = 200
_OUTPUTS_S = 120.0
"""Time limit of comparing two outputs; the longest ones take seconds."""


class Comparator:
    """Owns the process and starts it on first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def judge(self, answer: str, reference: str, limits: ResourceLimits) -> Verdict:
        """`success` or `wrong_answer`; also `wrong_answer` if the answer cannot be parsed within the limits.

        Raises:
            OSError: the process failed.
        """
        return self._verdict({"answer": answer, "reference": reference}, limits)

    def score(self, answer: str, tests: ScoredAnswer, limits: ResourceLimits) -> Verdict:
        """`success` if the scorer gives the answer 1, else `wrong_answer`; also if it takes too long.

        Raises:
            OSError: the process failed.
        """
        return self._verdict({"answer": answer, "task": tests.task, "entry": tests.entry}, limits)

    def _verdict(self, question: dict[str, object], limits: ResourceLimits) -> Verdict:
        self._connect()  # the start does not count as the answer's time
        started = time.monotonic()
        reply = self._ask(question, b"", limits.wall_s)
        wall_s = time.monotonic() - started
        if reply is None:
            return Verdict("wrong_answer", 0, 1, "the answer could not be read in time", wall_s)
        if reply["right"]:
            return Verdict("success", 1, 1, "", wall_s)
        return Verdict("wrong_answer", 0, 1, reply["message"], wall_s)

    def outputs_match(self, actual: str, expected: str, tolerance: float | None, any_case: bool = False) -> bool:
        """The result of `verdicts.outputs_match`; long outputs are compared in the process.

        Raises:
            OSError: the process failed.
        """
        actual, expected = actual.strip(), expected.strip()
        if actual == expected:
            return True
        if min(len(actual), len(expected)) < _LONG_CHARS:
            return outputs_match(actual, expected, tolerance, any_case)
        outputs = [text.encode(errors="surrogatepass") for text in (actual, expected)]
        question: dict[str, object] = {"tolerance": tolerance, "any_case": any_case, "size": len(outputs[0])}
        reply = self._ask(question, b"".join(outputs), _OUTPUTS_S)
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

    def _ask(self, question: dict[str, object], blob: bytes, timeout_s: float) -> dict[str, Any] | None:
        """The reply of the process; None if there is none in time."""
        connection = self._connect()
        connection.settimeout(timeout_s)  # sending blocks too if the process does not read
        try:
            protocol.send(connection, question, blob)
            return _receive(connection)
        except TimeoutError:
            self.close()
            return None

    def _connect(self) -> socket.socket:
        """The connection to the process, which is started if it does not run."""
        return self._connection or self._start()

    def _start(self) -> socket.socket:
        connection, theirs = socket.socketpair()
        self._connection = connection
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "eval_pipeline.judge.comparator"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
            )
        connection.settimeout(_START_S)
        try:
            _receive(connection)
        except TimeoutError as error:
            raise OSError("the process that compares answers does not start") from error
        return connection


def _receive(connection: socket.socket) -> dict[str, Any]:
    try:
        received = protocol.receive(connection)
    except protocol.FrameError as error:
        raise OSError(str(error)) from error
    if received is None:
        raise OSError("the process that compares answers ended unexpectedly")
    return received[0]


# The process


def main() -> None:
    """Reply to each question on standard output until the input ends."""
    child_process_args(
        "eval_pipeline.judge.comparator",
        "Compares answers with references, and outputs with expected outputs.",
        f"{program('eval')} run --checkpoint models/mine --recipe gsm8k",
    )
    end_with_parent()  # a hanging parser does not notice that its input ends
    replies = os.dup(1)
    os.dup2(2, 1)  # so that the output of a parser is not taken for a reply
    protocol.write(replies, {"ready": True})
    while (received := protocol.read(0)) is not None:
        question, blob = received
        protocol.write(replies, _compare_outputs(question, blob) if blob else _compare_answer(question))


def _compare_outputs(question: dict[str, Any], blob: bytes) -> dict[str, object]:
    size = question["size"]
    actual, expected = (part.decode(errors="surrogatepass") for part in (blob[:size], blob[size:]))
    return {"right": outputs_match(actual, expected, question["tolerance"], question["any_case"])}


def _compare_answer(question: dict[str, str]) -> dict[str, object]:
    if "task" in question:
        found = score(question["answer"], question["task"], question["entry"])
        return {"right": found == 1, "message": f"the scorer of {question['task']} gives it {found:.3g}"}
    answer, reference = question["answer"], question["reference"]
    try:
        right = is_right(answer, reference)
        message = "" if right else _difference(stated_result(answer, reference), reference)
    except (ArithmeticError, ValueError, RecursionError, MemoryError, NotAFormula) as error:
        return {"right": False, "message": f"the answer could not be read: {type(error).__name__}"}
    return {"right": right, "message": message}


def _difference(stated: str | None, reference: str) -> str:
    found = "found no result" if stated is None else f"read {_shown(stated)}"
    return f"{found}, expected {_shown(reference)}"


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]}..."


if __name__ == "__main__":
    main()
