"""Judges answers that are compared with a reference, in a process that may be killed: parsers can hang."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import IO

from eval_pipeline.judge.inside import frames
from eval_pipeline.judge.limits import Limits
from eval_pipeline.judge.pipes import pipes_of
from eval_pipeline.judge.sandbox import readable
from eval_pipeline.judge.verdict import Verdict

_START_S = 60.0
"""Importing the parsers may take long on a busy machine; it is not the answer's time."""


class ReferenceJudge:
    """Owns the process, which starts when it is first needed."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen[bytes] | None = None

    def judge(self, answer: str, reference: str, limits: Limits) -> Verdict:
        """`success` or `wrong_answer`; the latter too for an answer that no parser gets through within the limits.

        Raises:
            OSError: the process failed.
        """
        started = time.monotonic()
        reply = self._ask({"answer": answer, "reference": reference}, limits.wall_s)
        wall_s = time.monotonic() - started
        if reply is None:
            return Verdict("wrong_answer", 0, 1, "the answer could not be read in time", wall_s)
        if reply["right"]:
            return Verdict("success", 1, 1, "", wall_s)
        return Verdict("wrong_answer", 0, 1, reply["message"], wall_s)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, question: dict[str, str], timeout_s: float) -> dict | None:
        process = self._process or self._start()
        stdin, stdout = pipes_of(process)
        stdin.write(frames.pack(question))
        stdin.flush()
        if not readable([stdout], timeout_s):
            self.close()
            return None
        return _read(stdout)

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "eval_pipeline.judge.reference_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        _, stdout = pipes_of(process)
        if not readable([stdout], _START_S):
            raise OSError("the process that compares with references does not start")
        _read(stdout)
        return process


def _read(stdout: IO[bytes]) -> dict:
    try:
        received = frames.read(stdout.fileno())
    except frames.FrameError as error:
        raise OSError(str(error)) from error
    if received is None:
        raise OSError("the process that compares with references ended unexpectedly")
    return received[0]
