"""The process that holds vLLM, as its owner sees it."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import psutil

from eval_pipeline.engines.engine import EngineDied
from verl_ext.config.secrets import without_secrets
from verl_ext.paths import python_path

LOOK_S = 1.0
"""How often a silent child is looked after."""
KILLED_S = 30.0
"""How long a killed child may take to be gone: one that waits for a broken device or disk may never be."""
END_S = 15.0
"""How long a child may take to leave by itself."""
DIED_S = 2.0
"""How long it may take where it has closed the connection, which happens a moment before its end."""
NUM_LAST_LINES = 12
_OF_THE_HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy")
"""Secrets that loading a model may need."""


class VllmChild:
    """A child process, its connection and what it wrote. Started by an exec, never a fork of a process with threads.

    Args:
        silence_s: how long it may show no sign of life once it has loaded its model.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s, self._ending = silence_s, threading.RLock()
        self._connection, theirs = Pipe()
        _limit_sending(self._connection, silence_s)
        self._log = tempfile.TemporaryFile()
        command = [sys.executable, "-m", "eval_pipeline.engines.vllm_process", str(theirs.fileno()), str(os.getpid())]
        # native libraries write to standard output, which belongs to the owner's tables: all goes to the log. A session
        # of its own, so that Ctrl-C and a hang-up are the owner's to judge, and all that vLLM starts ends with it.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**without_secrets(os.environ, keep=_OF_THE_HUB), "PYTHONPATH": python_path()},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_open(self) -> bool:
        """Whether it was not told to end."""
        return not self._connection.closed

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            EngineDied: the child is no more, or takes nothing in.
        """
        try:
            self._connection.send(message)
        except BlockingIOError:
            raise self._hangs() from None
        except OSError:
            raise self._died() from None

    def receive(self, is_loading: bool = False) -> Any:
        """Wait for the next message.

        Args:
            is_loading: whether the child loads its model, which takes as long as it takes.

        Raises:
            EngineDied: the child is no more, or was silent for too long.
        """
        # looks are counted and not the clock, which goes on while a scheduler holds both processes
        look_s, silent_s = min(LOOK_S, self._silence_s), 0.0
        try:
            while not self._connection.poll(look_s):
                silent_s += look_s
                if silent_s >= self._silence_s and not is_loading:
                    raise self._hangs()
                # a process forked from this one may hold the child's end open, which then never ends
                if self._has_exited() and not self._connection.poll():
                    raise EOFError
            return self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def end(self) -> None:
        """End the child and all that it started; may be called again."""
        with self._ending:
            self._connection.close()
            self._end_within(END_S)
            self._log.close()

    def _end_within(self, seconds: float) -> None:
        with self._ending:  # who closes it and who reads from it may both see to its end
            if self._process.returncode is None:
                self._kill_after(seconds)

    def _kill_after(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._has_exited() and time.monotonic() < deadline:
            time.sleep(0.02)
        # vLLM's workers leave by themselves, and Python's resource tracker after them, which frees their shared memory
        psutil.wait_procs(self._others(), max(0.0, deadline - time.monotonic()))
        # before the child is waited for: until then nobody else can have its number
        os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_S)

    def _others(self) -> list[psutil.Process]:
        """Processes of the child's session besides itself; those that it left behind belong to init by now."""
        others = []
        for pid in psutil.pids():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):  # it may end at any moment
                if pid != self.pid and os.getsid(pid) == self.pid:
                    others.append(psutil.Process(pid))
        return others

    def _has_exited(self) -> bool:
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _died(self) -> EngineDied:
        self._end_within(DIED_S)
        return EngineDied(f"the vLLM process died ({_reason(self._process.returncode)}); {self._last_lines()}")

    def _hangs(self) -> EngineDied:
        self._end_within(0)
        return EngineDied(
            f"the vLLM process made no progress for {self._silence_s:g} s (engine.timeout_s) and was killed; "
            f"{self._last_lines()}"
        )

    def _last_lines(self) -> str:
        if self._log.closed:  # its owner ended it while another thread read from it
            return "it was shut down by its owner"
        self._log.seek(0)
        return "\n".join(["its last lines:", *self._log.read().decode(errors="replace").splitlines()[-NUM_LAST_LINES:]])


def _limit_sending(connection: Connection, seconds: float) -> None:
    """Have a send that makes no progress for so long fail with `BlockingIOError`."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))  # struct timeval
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _reason(exit_code: int | None) -> str:
    if exit_code is None:
        return "it cannot be killed"
    if exit_code == -signal.SIGKILL:
        return "SIGKILL, possibly out of memory"
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
