"""A user's reward function in processes that can be killed: it may raise, hang or crash."""

from __future__ import annotations

import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe

from verl_ext.console import warn
from verl_ext.errors import UserError
from verl_ext.grpo.protocols import RewardError, RewardFailure
from verl_ext.grpo.rewards.answer import RewardedAnswer
from verl_ext.grpo.rewards.custom_process import SIZE, Reply
from verl_ext.paths import python_path
from verl_ext.plugins import Plugin
from verl_ext.processes import has_ended

_KILL_GROUP_AT_END_OF_INPUT = ("/bin/sh", "-c", 'read -r line; kill -KILL "-$1"', "sh")
ENDED = RewardFailure("it ended its process", kind="crash")
START_S = 120.0
"""Time limit for importing the user's file; imports do not count toward the function's time limit."""


class RewardProcessPool:
    """Calls a user's function as `UserFunction` does, in other processes.

    Args:
        plugin: the function.
        time_limit_s: time limit of one call.
        num_workers: maximum number of processes. The first is started here, others as needed.

    Raises:
        UserError: the function cannot be loaded or called.
    """

    def __init__(self, plugin: Plugin, time_limit_s: float, num_workers: int) -> None:
        self._plugin, self._time_limit_s = plugin, time_limit_s
        self._has_warned = self._is_closed = False
        self._busy: set[_Process] = set()
        self._idle: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        for _ in range(num_workers - 1):
            self._idle.put(None)
        self._idle.put(_Process(plugin))
        self._threads = ThreadPoolExecutor(num_workers)

    def submit(self, answer: RewardedAnswer) -> Future[float | None]:
        """Start to score an answer; see `score`."""
        return self._threads.submit(self.score, answer)

    def score(self, answer: RewardedAnswer) -> float | None:
        """Score an answer; retry once if the call times out or its process ends.

        Returns:
            The score; None if the function does not apply to the answer.

        Raises:
            RewardError: the function failed.
        """
        try:
            return self._score_once(answer)
        except RewardError as error:
            if self._is_closed or (not error.failure.timed_out and error.failure != ENDED):
                raise
            if error.failure.timed_out and not self._has_warned:
                self._has_warned = True
                warn(
                    f"the reward function {self._plugin} took more than {self._time_limit_s:g} s for "
                    f"{answer.sample_id}; the call is repeated once, and later timeouts are only counted"
                )
        # the machine, or a service that the function calls, may have been busy, or the kernel killed the process
        return self._score_once(answer)

    def close(self) -> None:
        """End the processes; pending and running calls fail."""
        self._is_closed = True
        for busy in list(self._busy):
            busy.interrupt()
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            if (process := self._idle.get()) is not None:
                process.kill()

    def _score_once(self, answer: RewardedAnswer) -> float | None:
        idle, process = self._idle.get(), None
        try:
            if idle is not None and idle.has_ended():  # killed while it was idle
                idle.kill()
                idle = None
            process = idle or _Process(self._plugin)
            self._busy.add(process)
            if self._is_closed:
                process.interrupt()
            return process.call(answer, self._time_limit_s)
        finally:
            if process is not None:
                self._busy.discard(process)
            # a process that failed to answer is not used again; the next call starts another
            self._idle.put(process if process is not None and process.is_alive else None)


class _Process:
    """A process that has loaded the function; one call at a time."""

    def __init__(self, plugin: Plugin) -> None:
        """Start the process and load the function.

        Raises:
            UserError: the function cannot be loaded or called.
        """
        command = [sys.executable, "-m", "verl_ext.grpo.rewards.custom_process", plugin.location, plugin.name]
        environment = {**os.environ, "PYTHONPATH": python_path()}
        calls, self._calls = Pipe(duplex=False)
        with calls:  # the process has its own end of the pipe
            self._process = subprocess.Popen(
                command, stdin=calls.fileno(), stdout=subprocess.PIPE, env=environment, start_new_session=True
            )
        assert self._process.stdout is not None
        self._replies = self._process.stdout
        self.is_alive = True
        # if this rank is killed, this also kills the processes that the function started
        self._guard = subprocess.Popen(
            [*_KILL_GROUP_AT_END_OF_INPUT, str(self._process.pid)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            reply = self._reply(START_S)
        except RewardError as error:
            raise UserError(
                f"{plugin.key} names {plugin.location}, which cannot be loaded ({error}); fix its top-level code"
            ) from error
        if isinstance(reply, RewardFailure):
            self.kill()
            raise UserError(reply.reason)

    def call(self, answer: RewardedAnswer, time_limit_s: float) -> float | None:
        """Score an answer; None if the function does not apply to it.

        Raises:
            RewardError: the function raised, returned neither a finite number nor None, took too long, or ended its
                process.
        """
        try:
            self._calls.send(answer)
        except OSError as error:
            self.kill()
            raise RewardError(ENDED) from error
        reply = self._reply(time_limit_s)
        if isinstance(reply, RewardFailure):
            raise RewardError(reply)
        return reply

    def interrupt(self) -> None:
        """Let a call in another thread fail at once; that thread then calls `kill`."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()

    def has_ended(self) -> bool:
        """Whether the process has ended; it stays a zombie, so that its number is not reused before `kill`."""
        return has_ended(self._process.pid)

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        self.is_alive = False
        self._guard.kill()  # first: the group's number may soon be reused
        self._guard.communicate()
        with suppress(ProcessLookupError):  # it has already ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._calls.close()
        self._replies.close()

    def _reply(self, time_limit_s: float) -> Reply:
        deadline = time.monotonic() + time_limit_s
        try:
            size = SIZE.unpack(self._read(SIZE.size, deadline))[0]
            return pickle.loads(self._read(size, deadline))
        except TimeoutError:
            failure = RewardFailure(f"it took more than {time_limit_s:g} s", timed_out=True, kind="timeout")
        except EOFError:
            failure = ENDED
        self.kill()
        raise RewardError(failure)

    def _read(self, size: int, deadline: float) -> bytes:
        """Read `size` bytes before a deadline; the function may write to the pipe, too, so fewer may arrive."""
        fd, data = self._replies.fileno(), b""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while len(data) < size:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            chunk = os.read(fd, size - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data
