"""A process that runs tests, as the server talks to it."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any

from eval_pipeline.judge.compiled import compiled
from eval_pipeline.judge.inside import frames
from eval_pipeline.judge.sandbox import readable

_DIED = {"outcome": "died", "message": "the test could not be finished with what the answer returned"}


class Tester:
    """Runs one test at a time, until one leaves something behind."""

    def __init__(self, control: socket.socket) -> None:
        """Talk to the process behind a connection."""
        self._control = control
        self.num_tests = 0
        self.is_clean = True
        """Whether another test may run there."""

    def start(self, job: dict[str, Any], answer: socket.socket) -> None:
        """Have a test run against the answer behind a connection.

        Args:
            job: "preamble", "entry_point", "test" and "limits", see `inside/tester.py`.
            answer: may be closed here afterwards.

        Raises:
            OSError: the process is gone.
        """
        self.is_clean = False
        self.num_tests += 1
        test = compiled(job["preamble"], job["test"])
        message = {**job, "leaves_nothing": test.leaves_nothing}
        frames.send(self._control, message, test.code, (answer.fileno(),))

    def outcome(self, deadline: float) -> dict[str, str]:
        """What the test came to; without a word from it by `deadline` of the monotonic clock, "died"."""
        if readable([self._control], deadline - time.monotonic()):
            with suppress(frames.FrameError):
                if (received := frames.receive(self._control)) is not None:
                    self.is_clean = received[0]["is_clean"]
                    return received[0]
        return _DIED

    def fileno(self) -> int:
        """Of the connection, readable once there is an outcome."""
        return self._control.fileno()

    def close(self) -> None:
        """End the process, as soon as it looks."""
        self._control.close()
