"""The client of the judge: starts a server process, sends it requests, and replaces it if it dies or hangs."""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import IO, Any

from eval_pipeline.judge.inside import protocol
from eval_pipeline.judge.isolation import find_packages
from eval_pipeline.judge.types import (
    ISOLATION_LEVELS,
    JudgeConfig,
    JudgeRequest,
    ProgramRun,
    ResourceLimits,
    RunReport,
    Submission,
    Verdict,
    request_to_json,
    result_from_json,
)
from verl_ext.console import progress_bar, warn
from verl_ext.errors import UserError
from verl_ext.paths import IMPORT_PATH
from verl_ext.processes import bare_environment

_START_S = 600.0
"""How long a server may take to find a level that works, starting the sandboxes of one level after another."""
_END_S = 10.0
_MAX_DEATHS = 5
"""Pending requests fail after this many consecutive server processes have died at the start or without a result."""
_CHECK_S = 1.0
_SANDBOX_START_S = 120.0
"""How long the sandboxes of a worker may take to start on a busy machine."""
_GRACE_S = 15.0
"""The server waits this much longer than the wall-clock limit for a run to end."""


class JudgeServerError(RuntimeError):
    """There is no result: the judge was closed, its server died repeatedly, or the sandboxes fail."""


class _DiedAtStart(JudgeServerError):
    """A server process ended before it could judge anything."""


@dataclass
class _Pending:
    """A request without a result."""

    request: JudgeRequest
    limits: ResourceLimits
    future: Future[Any]
    is_retry: bool = False

    def longest_s(self, num_workers: int) -> float:
        """The longest time that a server can spend on the request.

        A run that hit the wall-clock limit is repeated alone, so it may wait for the repetitions of all other workers.
        """
        return _SANDBOX_START_S + max(1, self.request.num_tests) * (1 + num_workers) * (self.limits.wall_s + _GRACE_S)


class JudgeClient:
    """Judges answers and runs programs in a server process that owns the sandboxes.

    No sandbox is forked from a process with vLLM or a CUDA context. If the server dies or hangs, the client starts
    another one and sends pending requests again. A request whose sandbox fails is repeated once.

    Use it as a context manager. `submit` and `run` can be called from any thread.

    Args:
        config: isolation, limits and packages; None uses the defaults.
        section: name of the section that holds `config`, for messages.

    Raises:
        UserError: unknown isolation level or package, or a number of workers below 1.

    Attributes:
        isolation: isolation level in use, set when the context is entered.
    """

    def __init__(self, config: JudgeConfig | None = None, *, section: str = "judge") -> None:
        self._config = config = config or JudgeConfig()
        self._section = section
        if config.isolation not in ("auto", *ISOLATION_LEVELS):
            raise UserError(f"isolation {config.isolation!r} does not exist; use auto, {', '.join(ISOLATION_LEVELS)}")
        if config.num_workers is not None and config.num_workers < 1:
            raise UserError(f"num_workers is {config.num_workers}; it must be at least 1")
        self._num_workers = config.num_workers or len(os.sched_getaffinity(0))
        self._packages = find_packages(config.packages, f"{section}.packages")
        self._pending: dict[int, _Pending] = {}
        self._lock = threading.Lock()
        self._num_submitted = 0
        self._is_closed = self._is_down = False
        self._has_ended = threading.Event()
        self._is_returning = False  # the caller's callback is running, so nobody reads what the server returns
        self._silent_s = self._longest_s = 0.0
        self.isolation = ""

    def __enter__(self) -> JudgeClient:
        """Start the server.

        Raises:
            UserError: the configured isolation does not work on this machine.
            JudgeServerError: the server does not start.
        """
        reasons = self._start_process(self._config.isolation)
        if self._config.isolation == "auto" and self.isolation != ISOLATION_LEVELS[0]:
            self._warn_of_fallback(reasons)
        self._start_reader()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server and all of its sandboxes; pending requests fail."""
        with self._lock:
            self._is_closed = True
            self._end_process()
        self._has_ended.set()
        self._reader.join()
        self._watcher.join()
        self._stdout.close()

    def submit(self, submission: Submission, limits: ResourceLimits | None = None) -> Future[Verdict]:
        """Judge one answer.

        Args:
            submission: the answer; with an `error`, the verdict is `api_error` and nothing runs.
            limits: limits of each run; None uses the configured ones.

        Returns:
            A future of the verdict, or of a `JudgeServerError` if no server can judge the answer.
        """
        if submission.error is not None:
            future: Future[Verdict] = Future()
            future.set_result(Verdict("api_error", 0, submission.num_tests, submission.error))
            return future
        return self._request(submission, limits)

    def run(self, program: str, stdin: str = "", limits: ResourceLimits | None = None) -> Future[RunReport]:
        """Run one program without judging it.

        Args:
            program: Python source.
            stdin: standard input.
            limits: limits of the run; None uses the configured ones.

        Returns:
            A future of the report, or of a `JudgeServerError` if no sandbox can run the program.
        """
        return self._request(ProgramRun(program, stdin), limits)

    def judge_all(self, submissions: Iterable[Submission], progress: bool = True) -> list[Verdict]:
        """Judge all answers.

        Args:
            submissions: the answers.
            progress: whether to show a progress bar.

        Returns:
            The verdicts, in the order of the submissions. An answer that no server could judge is an `api_error`.
        """
        futures = [self.submit(submission) for submission in submissions]
        done = as_completed(futures)
        for _ in progress_bar(done, total=len(futures), desc="judging", unit="answers", show=progress):
            pass
        return [_verdict_or_error(future, submission) for future, submission in zip(futures, submissions, strict=True)]

    def _request(self, request: JudgeRequest, limits: ResourceLimits | None) -> Future[Any]:
        pending = _Pending(request, limits or self._config.limits, Future())
        try:
            with self._lock:
                self._add(pending)
        except JudgeServerError as error:
            pending.future.set_exception(error)
        return pending.future

    def _add(self, pending: _Pending) -> None:
        if self._is_closed:
            raise JudgeServerError("the judge server is closed")
        if self._is_down:
            self._restart()
            self._start_reader()
        if not self._pending:
            self._silent_s = self._longest_s = 0.0
        self._longest_s = max(self._longest_s, pending.longest_s(self._num_workers))
        self._num_submitted += 1
        self._pending[self._num_submitted] = pending
        self._send(self._num_submitted)

    def _send(self, number: int) -> None:
        pending = self._pending[number]
        message = {"id": number, **request_to_json(pending.request, pending.limits)}
        with suppress(OSError):  # the process has died, and the next one receives all pending requests
            protocol.write(self._stdin.fileno(), message)

    # The server process

    def _start_process(self, isolation: str) -> list[str]:
        """Start a server; returns why stronger levels than the one in use do not work."""
        for _ in range(_MAX_DEATHS - 1):
            with suppress(_DiedAtStart):
                return self._start_once(isolation)
        return self._start_once(isolation)

    def _start_once(self, isolation: str) -> list[str]:
        packages = [asdict(package) for package in self._packages]
        options = {"isolation": isolation, "num_workers": self._num_workers, "packages": packages}
        self._silent_s = -_START_S  # for `_watch`
        # The server needs no environment variables, and answers may find a way to read its memory. It has its own
        # session, because Ctrl-C in the terminal is for the client; the server ends when its input ends.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "eval_pipeline.judge.server", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**bare_environment(os.environ), "PYTHONPATH": IMPORT_PATH},
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        greeting = self._receive_greeting()
        if "isolation" not in greeting:
            self._end_process()
            self._stdout.close()
            raise self._refusal(greeting.get("refused"))
        self.isolation = greeting["isolation"]
        self._silent_s = 0.0
        return greeting["reasons"]

    def _receive_greeting(self) -> dict[str, Any]:
        """The first message of a server; empty if the server ends before it.

        Raises:
            JudgeServerError: the server hangs. Another one would hang as well, and waiting for several takes hours.
        """
        if not _is_readable(self._stdout, _START_S):
            self._process.kill()
            self._end_process()
            self._stdout.close()
            raise JudgeServerError(f"the judge server did not start within {_START_S:.0f} s")
        with suppress(protocol.FrameError):  # it ended in the middle of the message
            if (received := protocol.read(self._stdout.fileno())) is not None:
                return received[0]
        return {}

    def _refusal(self, reasons: list[str] | None) -> Exception:
        if reasons is None:
            return _DiedAtStart(f"the judge server did not start (exit status {self._process.returncode})")
        found = f" ({'; '.join(reasons)})" if reasons else ""
        if self._config.isolation != "auto":
            return UserError(
                f"isolation {self._config.isolation} does not work on this machine{found}; use another level"
            )
        return UserError(
            f"neither bwrap nor sandlock works on this machine{found}; fix one of them or set "
            f"{self._section}.isolation=rlimits, which limits resources only: answers can read and write everything "
            "that this user can"
        )

    def _warn_of_fallback(self, reasons: Sequence[str]) -> None:
        best, why = ISOLATION_LEVELS[0], reasons[0] if reasons else "bubblewrap is not installed"
        _warn_once(
            f"answers run with isolation={self.isolation}, because {best} does not work here ({why}); set "
            f"{self._section}.isolation={best} to disable the fallback"
        )

    def _end_process(self) -> None:
        self._stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _restart(self) -> None:
        """Start another process, at the same level as the first."""
        try:
            self._start_process(self.isolation)
        except (UserError, OSError) as error:
            raise JudgeServerError(f"the judge server cannot be started again: {error}") from error
        self._is_down = False

    # Threads

    def _watch(self) -> None:
        """Kill a server that hangs: it neither ends nor returns anything, although requests are pending.

        This needs its own thread, because a hanging server may stop reading and block the thread that sends a request.
        """
        while not self._has_ended.wait(_CHECK_S):
            process = self._process
            if self._is_returning:
                continue
            # counted, not measured: a client that was itself suspended has hardly waited
            self._silent_s += _CHECK_S
            if self._pending and self._silent_s > self._longest_s:
                warn(f"the judge server returned nothing for {self._silent_s:.0f} s; restarting it")
                self._silent_s = 0.0
                process.kill()

    def _start_reader(self) -> None:
        self._reader = threading.Thread(target=self._read_results, daemon=True)
        self._reader.start()

    def _read_results(self) -> None:
        """Return results to their callers, and replace a process that dies."""
        num_deaths = 0
        while True:
            num_deaths = 1 if self._read_until_death() else num_deaths + 1
            self._process.kill()  # it may be alive with broken output
            status = self._process.wait()
            with self._lock:
                try:
                    self._replace_process(status, num_deaths)
                except JudgeServerError as error:
                    failed, self._pending = self._pending, {}
                    self._is_down = True
                    failure = error
                    break
        for pending in failed.values():  # without the lock, because a waiting caller may submit immediately
            if pending.future.set_running_or_notify_cancel():
                pending.future.set_exception(failure)

    def _replace_process(self, status: int, num_deaths: int) -> None:
        """Start another process and send it all pending requests."""
        if self._is_closed:
            raise JudgeServerError("the judge server was closed before this answer was judged")
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        if num_deaths == _MAX_DEATHS:
            raise JudgeServerError(f"the judge server died {num_deaths} times without a verdict ({how})")
        self._stdin.close()
        self._stdout.close()
        self._restart()
        warn(f"the judge server died ({how}); a new one judges the {len(self._pending)} pending answers again")
        for number in self._pending:
            self._send(number)

    def _read_until_death(self) -> bool:
        """Return results until the process ends; returns whether there was one."""
        found = False
        with suppress(protocol.FrameError):  # it ended in the middle of a message
            while (received := protocol.read(self._stdout.fileno())) is not None:
                found = True
                self._silent_s = 0.0
                self._settle(*received)
        return found

    def _settle(self, message: dict[str, Any], blob: bytes) -> None:
        number = message["id"]
        with self._lock:
            pending = self._pending[number]
            result = _result_of(pending.request, message, blob)
            has_failed = result.error_type == "api_error" if isinstance(result, Verdict) else "failed" in message
            if has_failed and not pending.is_retry and not self._is_closed:
                pending.is_retry = True
                self._send(number)
                return
            del self._pending[number]
        if not pending.future.set_running_or_notify_cancel():
            return  # the caller no longer wants it
        self._is_returning = True
        if isinstance(result, JudgeServerError):
            pending.future.set_exception(result)
        else:
            pending.future.set_result(result)
        self._is_returning, self._silent_s = False, 0.0


def _result_of(request: JudgeRequest, message: dict[str, Any], blob: bytes) -> Verdict | RunReport | JudgeServerError:
    if "failed" not in message:
        return result_from_json(message, blob)
    if isinstance(request, Submission):
        return Verdict("api_error", 0, request.num_tests, message["failed"])
    return JudgeServerError(message["failed"])


def _is_readable(pipe: IO[bytes], timeout_s: float) -> bool:
    poll = select.poll()  # not `select`, which supports only file descriptors below 1024
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


@functools.cache
def _warn_once(message: str) -> None:
    """Warn once per process, however many servers it starts."""
    warn(message)


def _verdict_or_error(future: Future[Verdict], submission: Submission) -> Verdict:
    try:
        return future.result()
    except JudgeServerError as error:
        return Verdict("api_error", 0, submission.num_tests, str(error))
