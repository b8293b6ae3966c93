"""vLLM in a child process: the parent's side, and the messages between parent and child.

vLLM runs in a separate process, so that its death costs one batch and the parent stays small enough to fork judges.
"""

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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from eval_pipeline.config import EngineConfig, SamplingConfig
from eval_pipeline.engines import Engine, EngineDied, GeneratedAnswer, GenerateRequest
from verl_ext.config.secrets import without_secrets
from verl_ext.errors import UserError
from verl_ext.paths import python_path
from verl_ext.processes import has_ended

POLL_S = 1.0
"""How often a silent child is checked."""
KILL_TIMEOUT_S = 30.0
"""How long to wait for a killed child, which may never end if it is blocked on a broken device or disk."""
EXIT_TIMEOUT_S = 15.0
"""How long a child may take to exit by itself."""
DEATH_TIMEOUT_S = 2.0
"""How long a child that has closed the connection may take to exit."""
NUM_LOG_LINES = 12
_HUB_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy")
"""Secrets that loading a model may need."""


# Messages to the child


@dataclass(frozen=True)
class LoadModel:
    """Load a model; the first message. The reply is `ModelLoaded`, or a `UserError` if the model cannot be used."""

    config: EngineConfig
    model: str


@dataclass(frozen=True)
class Generate:
    """Answer these requests. The replies are lists of `FinishedAnswer` and, at the end, `GenerateDone`.

    Instead of the end, a `UserError` says that the chat template cannot render a prompt.
    """

    requests: Sequence[GenerateRequest]
    sampling: SamplingConfig


@dataclass(frozen=True)
class Abort:
    """Drop the rest of the last `Generate`."""


# Messages from the child


@dataclass(frozen=True)
class ModelLoaded:
    """The model is ready."""

    protocol: dict[str, Any]
    seconds: dict[str, float]


FinishedAnswer = tuple[int, GeneratedAnswer]
"""An answer, with the index of its request in `Generate`. An empty list of answers means that a step was completed."""


@dataclass(frozen=True)
class GenerateDone:
    """The last message for a `Generate`."""

    seconds: float
    """Wall-clock time that it took."""


@dataclass(frozen=True)
class VllmFailed:
    """vLLM raised an exception; the last message of a child, which then exits."""

    error: str
    """Type of the exception and first line of its message."""


class VLLMEngine(Engine):
    """A model in a child process, which stays loaded between calls of `answers`.

    Greedy answers to the same list of requests are identical bit for bit on one machine with the same settings: all
    requests are added before the first step, in order, and the prefix cache is empty at the start. A different list may
    change logits by about 1e-6 in float32, and more in bfloat16, which changes an answer if two tokens are about
    equally likely.

    Args:
        export: Hugging Face model directory with a chat template.
    """

    def __init__(self, config: EngineConfig, export: Path) -> None:
        self._config, self._export = config, export
        self._child: VllmChild  # set by `__enter__`

    def __enter__(self) -> VLLMEngine:
        self._child = VllmChild(self._config.timeout_s)
        try:
            self._child.send(LoadModel(self._config, str(self._export)))
            reply = self._child.receive(self._config.load_timeout_s)
            if isinstance(reply, UserError):
                raise reply
        except BaseException:
            self._child.end()
            raise
        self.protocol, self.seconds = reply.protocol, {**reply.seconds, "generate_s": 0.0}
        return self

    def __exit__(self, *_: object) -> None:
        self._child.end()

    def answers(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig
    ) -> Iterator[tuple[GenerateRequest, GeneratedAnswer]]:
        self._child.send(Generate(tuple(requests), sampling))
        try:
            for index, answer in self._receive_answers():
                yield requests[index], answer
        except GeneratorExit:
            if self._child.is_open:
                self._child.send(Abort())
                for _ in self._receive_answers():
                    pass  # finished before the child read the message
            raise

    def _receive_answers(self) -> Iterator[FinishedAnswer]:
        while not isinstance(message := self._child.receive(), GenerateDone):
            if isinstance(message, UserError):
                raise message
            yield from message
        self.seconds["generate_s"] += message.seconds


class VllmChild:
    """The child process, its connection and its output.

    Args:
        timeout_s: a child that is silent for this long after loading its model counts as hung.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._ending, self._was_killed = timeout_s, threading.RLock(), False
        self._connection, theirs = Pipe()
        _set_send_timeout(self._connection, timeout_s)
        self._log = tempfile.TemporaryFile()
        command = [sys.executable, "-m", "eval_pipeline.engines.vllm_process", str(theirs.fileno()), str(os.getpid())]
        # Native libraries write to standard output, so all output goes to the log. The child has its own session, so
        # that it gets no Ctrl-C and no hang-up, and everything that vLLM starts can be killed with it.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**without_secrets(os.environ, keep=_HUB_SECRETS), "PYTHONPATH": python_path()},
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
        """Whether the connection is open; `end` closes it."""
        return not self._connection.closed

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            EngineDied: the child is dead, or does not read.
        """
        try:
            self._connection.send(message)
        except BlockingIOError:
            raise self._hung() from None
        except OSError:
            raise self._died() from None

    def receive(self, load_timeout_s: float | None = None) -> Any:
        """Wait for the next message.

        Args:
            load_timeout_s: time limit while the child is loading its model, which vLLM itself does not limit; None
                afterwards.

        Raises:
            EngineDied: vLLM raised an exception, or the child is dead, or was silent for too long.
        """
        # count polls instead of reading the clock, which continues while a scheduler suspends both processes
        limit_s = self._timeout_s if load_timeout_s is None else load_timeout_s
        poll_s, silent_s = min(POLL_S, limit_s), 0.0
        try:
            while not self._connection.poll(poll_s):
                silent_s += poll_s
                if silent_s >= limit_s:
                    raise self._hung(load_timeout_s)
                # a process forked from this one may hold the child's end open, so that no EOF would arrive
                if self._has_exited() and not self._connection.poll():
                    raise EOFError
            message = self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(message, VllmFailed):
            raise EngineDied(f"vLLM failed ({message.error}){self._cause_of(message.error)}")
        if isinstance(message, UserError):
            message = type(message)(f"{message}{self._cause_of(str(message))}")
        return message

    def end(self) -> None:
        """End the child and everything that it started; may be called again."""
        with self._ending:
            self._connection.close()
            self._end_within(EXIT_TIMEOUT_S)
            self._log.close()

    def _end_within(self, seconds: float) -> None:
        with self._ending:  # the closing thread and the reading thread may both end the child
            if self._process.returncode is not None:
                return
            deadline = time.monotonic() + seconds
            while not self._has_exited() and time.monotonic() < deadline:
                time.sleep(0.02)
            # vLLM's workers exit by themselves, then Python's resource tracker, which frees their shared memory
            psutil.wait_procs(self._session_members(), max(0.0, deadline - time.monotonic()))
            self._was_killed = not self._has_exited()
            # kill before reaping, so that the process id cannot belong to another process
            os.killpg(self.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_TIMEOUT_S)

    def _session_members(self) -> list[psutil.Process]:
        """Other processes of the child's session; orphans are children of init."""
        members = []
        for pid in psutil.pids():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):  # it may end at any moment
                if pid != self.pid and os.getsid(pid) == self.pid:
                    members.append(psutil.Process(pid))
        return members

    def _has_exited(self) -> bool:
        return self._process.returncode is not None or has_ended(self._process.pid)

    def _died(self) -> EngineDied:
        self._end_within(DEATH_TIMEOUT_S)
        return EngineDied(
            f"the vLLM process died ({_describe_exit(self._process.returncode, self._was_killed)})"
            f"{self._last_log_lines()}"
        )

    def _hung(self, load_timeout_s: float | None = None) -> EngineDied:
        self._end_within(0)
        if load_timeout_s is None:
            what = f"made no progress for {self._timeout_s:g} s (engine.timeout_s)"
        else:
            what = f"did not load the model within {load_timeout_s:g} s (engine.load_timeout_s)"
        return EngineDied(f"the vLLM process {what} and was killed{self._last_log_lines()}")

    def _cause_of(self, error: str) -> str:
        """The last log lines if an error only refers to them, as vLLM's errors with tensor parallelism do."""
        return self._last_log_lines() if "stack trace" in error else ""

    def _last_log_lines(self) -> str:
        """The end of the message about the child's death."""
        if self._log.closed:  # its owner ended it while another thread read from it
            return "; it was shut down by its owner"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(["; its last lines:", *lines[-NUM_LOG_LINES:]]) if lines else ""


def _set_send_timeout(connection: Connection, seconds: float) -> None:
    """Make a send that makes no progress for this long fail with `BlockingIOError`."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        whole = int(seconds)
        timeval = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def _describe_exit(exit_code: int | None, was_killed: bool) -> str:
    if exit_code is None:
        return "it cannot be killed"
    if was_killed:
        return "it closed its connection without exiting and was killed"
    if exit_code == -signal.SIGKILL:
        return "SIGKILL, possibly out of memory"
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
