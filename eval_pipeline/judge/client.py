"""Sends submissions to a judge server of its own and hands out the verdicts."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType

from eval_pipeline.config import JudgeLimits
from eval_pipeline.judge.inside import frames
from eval_pipeline.judge.levels import LEVELS
from eval_pipeline.judge.packages import find_packages
from eval_pipeline.judge.pipes import pipes_of
from eval_pipeline.judge.submission import Submission
from eval_pipeline.judge.verdict import Verdict
from eval_pipeline.judge.wire import dump_submission, load_verdict, num_tests_of
from verl_ext.config.secrets import bare_environment
from verl_ext.console import progress_bar, warn
from verl_ext.errors import UserError
from verl_ext.paths import IMPORT_PATH

_END_S = 10.0
_MOST_DEATHS = 5
"""Of server processes in a row, at the start or without a verdict, before what is pending fails."""


@functools.cache
def _warn_once(message: str) -> None:
    warn(message)


def _warn_of_less(isolation: str, reasons: Sequence[str]) -> None:
    """Say that `auto` has found less than the best; a new server of the same process does not say it again."""
    if isolation != LEVELS[0]:
        why = reasons[0] if reasons else "bubblewrap is not installed"
        _warn_once(
            f"answers run with isolation={isolation}, because {LEVELS[0]} does not work here ({why}); "
            f"set isolation={LEVELS[0]} to refuse the fallback"
        )


class JudgeServerError(RuntimeError):
    """The judge server cannot judge an answer: it was closed, or its process dies again and again."""


class _DiedAtStart(JudgeServerError):
    """A process ended before it could judge anything."""


@dataclass
class _Pending:
    """An answer without a verdict so far."""

    submission: Submission
    limits: JudgeLimits
    future: Future[Verdict]
    is_second_try: bool = False


class JudgeServer:
    """A small process that owns the sandboxes, so that none is ever forked from one that holds vLLM.

    A context manager; submissions can be handed in from any thread. If the process dies, another one takes its place
    and judges what is pending again. An answer whose sandbox failed is judged once more too.
    """

    def __init__(
        self,
        isolation: str = "auto",
        num_workers: int | None = None,
        limits: JudgeLimits | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        """Start nothing yet.

        Args:
            isolation: bwrap, sandlock or rlimits (see `levels.py`); auto takes the first of the first two that works.
            num_workers: answers judged at a time; None takes one per processor.
            limits: of each run, where `submit` is given none; None takes the defaults of `JudgeLimits`.
            packages: installed packages that answers and tests may import beside the standard library.

        Raises:
            UserError: there is no such isolation level or package, or the number of workers is not positive.
        """
        if isolation not in ("auto", *LEVELS):
            raise UserError(f"isolation {isolation!r} does not exist; use auto, {', '.join(LEVELS)}")
        if num_workers is not None and num_workers < 1:
            raise UserError(f"num_workers is {num_workers}; it must be at least 1")
        self._wanted = isolation
        self._num_workers = num_workers or len(os.sched_getaffinity(0))
        self._limits = limits or JudgeLimits()
        self._packages = find_packages(packages)
        self._pending: dict[int, _Pending] = {}
        self._lock = threading.Lock()
        self._num_submitted = 0
        self._is_closed = self._is_down = False
        self.isolation = ""
        """The level in use, known once the context is entered."""

    def __enter__(self) -> JudgeServer:
        """Start the server.

        Raises:
            UserError: the wanted isolation does not work on this machine.
            JudgeServerError: the server does not come up.
        """
        reasons = self._start_process(self._wanted)
        if self._wanted == "auto":
            _warn_of_less(self.isolation, reasons)
        self._start_reader()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server with all its sandboxes; what it has not judged by then fails."""
        with self._lock:
            self._is_closed = True
            self._end_process()
        self._reader.join()
        self._stdout.close()

    def kill(self) -> None:
        """Kill its process, also one that neither reads nor answers any more; another one takes its place."""
        self._process.kill()

    def submit(self, submission: Submission, limits: JudgeLimits | None = None) -> Future[Verdict]:
        """Have one answer judged.

        Args:
            submission: one with an `error` is an `api_error` at once and goes to no sandbox.
            limits: what each of its runs may use; None for those of this server.

        Returns:
            The verdict, some time later; a `JudgeServerError` instead where no server can judge the answer.
        """
        future: Future[Verdict] = Future()
        if submission.error is not None:
            future.set_result(Verdict("api_error", 0, num_tests_of(submission.tests), submission.error))
            return future
        pending = _Pending(submission, limits or self._limits, future)
        try:
            with self._lock:
                self._take(pending)
        except JudgeServerError as error:
            future.set_exception(error)
        return future

    def _take(self, pending: _Pending) -> None:
        if self._is_closed:
            raise JudgeServerError("the judge server is closed")
        if self._is_down:
            self._restart()
            self._start_reader()
        self._num_submitted += 1
        self._pending[self._num_submitted] = pending
        self._send(self._num_submitted)

    def judge_all(self, submissions: Iterable[Submission], progress: bool = True) -> list[Verdict]:
        """Judge all answers; the verdicts are in their order.

        Args:
            submissions: what to judge.
            progress: show a bar.

        Returns:
            The verdicts. An answer that no server could judge is an `api_error`.
        """
        futures = [self.submit(submission) for submission in submissions]
        done = as_completed(futures)
        for _ in progress_bar(done, total=len(futures), desc="judging", unit="answers", show=progress):
            pass
        return [_verdict_or_error(future, submission) for future, submission in zip(futures, submissions, strict=True)]

    def _start_process(self, isolation: str) -> list[str]:
        """Start a server process; returns why levels before the one in use were not taken."""
        for _ in range(_MOST_DEATHS - 1):
            with suppress(_DiedAtStart):
                return self._start_once(isolation)
        return self._start_once(isolation)

    def _start_once(self, isolation: str) -> list[str]:
        packages = [asdict(package) for package in self._packages]
        options = {"isolation": isolation, "num_workers": self._num_workers, "packages": packages}
        # nothing of the environment is of use to the server, and answers may find a way to look into its process;
        # a session of its own: Ctrl-C in the terminal is for the client, and the server ends with its input
        self._process = subprocess.Popen(
            [sys.executable, "-m", "eval_pipeline.judge.server", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**bare_environment(os.environ), "PYTHONPATH": IMPORT_PATH},
            start_new_session=True,
        )
        self._stdin, self._stdout = pipes_of(self._process)
        received = None
        with suppress(frames.FrameError):  # it ended in the middle of the message
            received = frames.read(self._stdout.fileno())
        if received is None or "refused" in received[0]:
            self._end_process()
            self._close_pipes()
            raise self._refusal(received and received[0]["refused"])
        self.isolation = received[0]["isolation"]
        return received[0]["reasons"]

    def _close_pipes(self) -> None:
        with suppress(OSError):  # what is left to be written to a process that has died
            self._stdin.close()
        self._stdout.close()

    def _end_process(self) -> None:
        with suppress(OSError):  # what a server that has died did not take
            self._stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _restart(self) -> None:
        """Start another process, at the same level as the first; raises `JudgeServerError`."""
        try:
            self._start_process(self.isolation)
        except (UserError, OSError) as error:
            raise JudgeServerError(f"the judge server cannot be started again: {error}") from error
        self._is_down = False

    def _start_reader(self) -> None:
        self._reader = threading.Thread(target=self._serve, daemon=True)
        self._reader.start()

    def _serve(self) -> None:
        """Hand out verdicts, and replace a process that dies."""
        num_deaths = 0
        while True:
            num_deaths = 1 if self._hand_out() else num_deaths + 1
            self._process.kill()  # its output may be broken while it lives
            status = self._process.wait()
            with self._lock:
                try:
                    self._replace_process(status, num_deaths)
                except JudgeServerError as error:
                    failed, self._pending = self._pending, {}
                    self._is_down = True
                    failure = error
                    break
        for pending in failed.values():  # without the lock, for what waits for a future may submit at once
            if pending.future.set_running_or_notify_cancel():
                pending.future.set_exception(failure)

    def _replace_process(self, status: int, num_deaths: int) -> None:
        """Start another process and send it what is pending."""
        if self._is_closed:
            raise JudgeServerError("the judge server was closed before this answer was judged")
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        if num_deaths == _MOST_DEATHS:
            raise JudgeServerError(f"the judge server died {num_deaths} times without a verdict ({how})")
        self._close_pipes()
        self._restart()
        warn(f"the judge server died ({how}); a new one judges its {len(self._pending)} pending answers again")
        for number in self._pending:
            self._send(number)

    def _hand_out(self) -> bool:
        """Hand out verdicts until the process ends; returns whether there was one."""
        found = False
        with suppress(frames.FrameError):  # it ended in the middle of a verdict
            while (received := frames.read(self._stdout.fileno())) is not None:
                found = True
                self._settle(received[0]["id"], load_verdict(received[0]["verdict"]))
        return found

    def _settle(self, number: int, verdict: Verdict) -> None:
        with self._lock:
            pending = self._pending[number]
            if verdict.error_type == "api_error" and not pending.is_second_try:
                pending.is_second_try = True
                self._send(number)
                return
            del self._pending[number]
        if pending.future.set_running_or_notify_cancel():  # else whoever asked has gone
            pending.future.set_result(verdict)

    def _send(self, number: int) -> None:
        pending = self._pending[number]
        message = dump_submission(pending.submission, pending.limits)
        with suppress(OSError):  # the process has died, and the next one is sent what is pending
            self._stdin.write(frames.pack({"id": number, **message}))
            self._stdin.flush()

    def _refusal(self, reasons: list[str] | None) -> Exception:
        if reasons is None:
            return _DiedAtStart(f"the judge server did not start (exit status {self._process.returncode})")
        found = f" ({'; '.join(reasons)})" if reasons else ""
        if self._wanted != "auto":
            return UserError(f"isolation {self._wanted} does not work on this machine{found}; use another level")
        return UserError(
            f"neither bwrap nor sandlock works on this machine{found}; fix one of them or set isolation=rlimits, which "
            "limits resources only: answers can read and write everything that this user can"
        )


def _verdict_or_error(future: Future[Verdict], submission: Submission) -> Verdict:
    try:
        return future.result()
    except JudgeServerError as error:
        return Verdict("api_error", 0, num_tests_of(submission.tests), str(error))
