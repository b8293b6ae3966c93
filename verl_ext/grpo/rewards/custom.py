"""A reward function of the user's own, in processes that can be killed: it may raise, hang or crash."""

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
from pathlib import Path
from typing import Any

from eval_pipeline.judge.pipes import pipes_of
from verl_ext.errors import UserError
from verl_ext.grpo.rewards.answer import RewardedAnswer
from verl_ext.grpo.rewards.custom_process import SIZE

_ROOT = Path(__file__).resolve().parents[3]
_KILL_GROUP_AT_END_OF_INPUT = ("/bin/sh", "-c", 'read -r line; kill -KILL "-$1"', "sh")
_START_S = 120.0
"""Importing the user's file may take long; it is not the function's time."""


class RewardError(Exception):
    """A call has failed; the message says why."""


class CustomReward:
    """Calls `path:function` as verl does: `(data_source, solution_str, ground_truth, extra_info)`, by name."""

    def __init__(self, path: Path, function: str, time_limit_s: float, num_workers: int) -> None:
        """Start one process, to see that the function is there; others as they are needed.

        Raises:
            UserError: the file or the function cannot be loaded.
        """
        self._command = [sys.executable, "-m", "verl_ext.grpo.rewards.custom_process", str(path), function]
        self._time_limit_s = time_limit_s
        self._idle: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        for _ in range(num_workers - 1):
            self._idle.put(None)
        try:
            self._idle.put(_Process(self._command))
        except RewardError as error:
            raise UserError(
                f"the reward function {path}:{function} cannot be loaded ({error}); mend the file"
            ) from error
        self._threads = ThreadPoolExecutor(num_workers)

    def submit(self, answer: RewardedAnswer) -> Future[float]:
        """The score of one answer, some time later; a `RewardError` where the function gives none."""
        return self._threads.submit(self._score, answer)

    def close(self) -> None:
        """End the processes; what is not scored by then fails."""
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            if (process := self._idle.get()) is not None:
                process.kill()

    def _score(self, answer: RewardedAnswer) -> float:
        process = self._idle.get()
        try:
            process = process or _Process(self._command)
            return process.call(_arguments(answer), self._time_limit_s)
        finally:
            # one that has failed to answer is not used again; the next call starts another
            self._idle.put(process if process is not None and process.is_alive else None)


def _arguments(answer: RewardedAnswer) -> dict[str, Any]:
    return {
        "data_source": answer.data_source,
        "solution_str": answer.text,
        "ground_truth": answer.ground_truth,
        "extra_info": dict(answer.extra_info),
    }


class _Process:
    """One process with the function; one call at a time."""

    def __init__(self, command: list[str]) -> None:
        """Start it.

        Raises:
            RewardError: the function cannot be loaded.
        """
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        self._stdin, self._stdout = pipes_of(self._process)
        self.is_alive = True
        # when this rank is killed, what the function has started goes too
        self._guard = subprocess.Popen(
            [*_KILL_GROUP_AT_END_OF_INPUT, str(self._process.pid)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _, failure = self._reply(_START_S)
        if failure is not None:
            self.kill()
            raise RewardError(failure)

    def call(self, arguments: dict[str, Any], time_limit_s: float) -> float:
        """What the function returns.

        Raises:
            RewardError: it raised, took too long, or ended its process.
        """
        data = pickle.dumps(arguments)
        try:
            self._stdin.write(SIZE.pack(len(data)) + data)
            self._stdin.flush()
        except OSError as error:
            self.kill()
            raise RewardError("its process has ended") from error
        score, failure = self._reply(time_limit_s)
        if failure is not None:
            raise RewardError(failure)
        return score

    def kill(self) -> None:
        """End it with all that it started."""
        self.is_alive = False
        self._guard.kill()  # first: the number of the group may soon be another's
        self._guard.communicate()
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with suppress(OSError):  # what it has not taken
            self._stdin.close()
        self._stdout.close()

    def _reply(self, time_limit_s: float) -> tuple[float, str | None]:
        deadline = time.monotonic() + time_limit_s
        try:
            size = SIZE.unpack(self._take(SIZE.size, deadline))[0]
            return pickle.loads(self._take(size, deadline))
        except TimeoutError:
            self.kill()
            raise RewardError(f"it took more than {time_limit_s:g} s") from None
        except EOFError:
            self.kill()
            raise RewardError("it ended its process") from None

    def _take(self, size: int, deadline: float) -> bytes:
        fd, data = self._stdout.fileno(), b""
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
