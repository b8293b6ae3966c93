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
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from eval_pipeline.judge.inside import frames
from eval_pipeline.judge.levels import LEVELS
from eval_pipeline.judge.limits import Limits
from eval_pipeline.judge.packages import find_packages
from eval_pipeline.judge.pipes import pipes_of
from eval_pipeline.judge.submission import Submission
from eval_pipeline.judge.verdict import Verdict
from eval_pipeline.judge.wire import dump_submission, load_verdict, num_tests_of
from verl_ext.config.secrets import bare_environment
from verl_ext.errors import UserError
from verl_ext.metrics.notice import warn
from verl_ext.progress import progress_bar

_ROOT = Path(__file__).resolve().parents[2]
_END_S = 10.0


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
    """The judge server ended before it had judged everything."""


class JudgeServer:
    """A small process that owns the sandboxes, so that none is ever forked from one that holds vLLM.

    A context manager; submissions can be handed in from any thread.
    """

    def __init__(
        self,
        isolation: str = "auto",
        num_workers: int | None = None,
        limits: Limits | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        """Start nothing yet.

        Args:
            isolation: bwrap, sandlock or rlimits (see `levels.py`); auto takes the first of the first two that works.
            num_workers: answers judged at a time; None takes one per processor.
            limits: of each run, where `submit` is given none; None takes the defaults of `Limits`.
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
        self._limits = limits or Limits()
        self._packages = find_packages(packages)
        self._futures: dict[int, Future[Verdict]] = {}
        self._lock = threading.Lock()
        self._num_submitted = 0
        self._ended = False
        self.isolation = ""
        """The level in use, known once the context is entered."""

    def __enter__(self) -> JudgeServer:
        """Start the server.

        Raises:
            UserError: the wanted isolation does not work on this machine.
            JudgeServerError: the server does not come up.
        """
        packages = [asdict(package) for package in self._packages]
        options = {"isolation": self._wanted, "num_workers": self._num_workers, "packages": packages}
        # nothing of the environment is of use to the server, and answers may find a way to look into its process;
        # a session of its own: Ctrl-C in the terminal is for the client, and the server ends with its input
        self._process = subprocess.Popen(
            [sys.executable, "-m", "eval_pipeline.judge.server", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**bare_environment(os.environ), "PYTHONPATH": str(_ROOT)},
            start_new_session=True,
        )
        self._stdin, self._stdout = pipes_of(self._process)
        received = frames.read(self._stdout.fileno())
        if received is None or "refused" in received[0]:
            self.__exit__(None, None, None)
            raise self._refusal(received and received[0]["refused"])
        self.isolation = received[0]["isolation"]
        if self._wanted == "auto":
            _warn_of_less(self.isolation, received[0]["reasons"])
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server with all its sandboxes; what it has not judged by then fails."""
        with self._lock:
            self._ended = True
            with suppress(OSError):  # what a server that has died did not take
                self._stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.isolation:
            self._reader.join()
        self._stdout.close()

    def kill(self) -> None:
        """End its process at once, also when it neither reads nor answers any more; what waits for it fails."""
        self._process.kill()

    @property
    def ended(self) -> bool:
        """Whether it judges no more: it was closed, or its process has ended."""
        return self._ended

    def submit(self, submission: Submission, limits: Limits | None = None) -> Future[Verdict]:
        """Have one answer judged.

        Args:
            submission: one with an `error` is an `api_error` at once and goes to no sandbox.
            limits: what each of its runs may use; None for those of this server.

        Returns:
            The verdict, some time later; a `JudgeServerError` instead when the server ends before.
        """
        future: Future[Verdict] = Future()
        if submission.error is not None:
            future.set_result(Verdict("api_error", 0, num_tests_of(submission.tests), submission.error))
            return future
        message = dump_submission(submission, limits or self._limits)
        with self._lock:
            number = self._num_submitted = self._num_submitted + 1
            self._futures[number] = future
            taken = not self._ended and self._send({"id": number, **message})
        if not taken:
            self._fail_all()
        return future

    def judge_all(self, submissions: Iterable[Submission], progress: bool = True) -> list[Verdict]:
        """Judge all answers; the verdicts are in their order.

        Args:
            submissions: what to judge.
            progress: show a bar.

        Raises:
            JudgeServerError: the server ended before all were judged.
        """
        futures = [self.submit(submission) for submission in submissions]
        done = as_completed(futures)
        for future in progress_bar(done, total=len(futures), desc="judging", unit="answers", show=progress):
            future.result()
        return [future.result() for future in futures]

    def _send(self, message: dict[str, object]) -> bool:
        """Whether the server takes it; it is gone otherwise."""
        try:
            self._stdin.write(frames.pack(message))
            self._stdin.flush()
        except OSError:
            self._ended = True  # whoever notices it first
            return False
        return True

    def _read(self) -> None:
        try:
            while (received := frames.read(self._stdout.fileno())) is not None:
                with self._lock:
                    future = self._futures.pop(received[0]["id"])
                if future.set_running_or_notify_cancel():  # else whoever asked has gone
                    future.set_result(load_verdict(received[0]["verdict"]))
        except frames.FrameError:
            pass  # it ended in the middle of a verdict
        finally:
            with self._lock:
                self._ended = True
            self._fail_all()

    def _fail_all(self) -> None:
        """Fail what is waiting; without the lock, for what waits for a future may submit at once."""
        with self._lock:
            waiting, self._futures = self._futures, {}
        for future in waiting.values():
            if future.set_running_or_notify_cancel():
                failure = JudgeServerError("the judge server ended before this answer was judged; run it again")
                future.set_exception(failure)

    def _refusal(self, reasons: list[str] | None) -> Exception:
        if reasons is None:
            return JudgeServerError(f"the judge server did not start (exit status {self._process.returncode})")
        found = f" ({'; '.join(reasons)})" if reasons else ""
        if self._wanted != "auto":
            return UserError(f"isolation {self._wanted} does not work on this machine{found}; use another level")
        return UserError(
            f"neither bwrap nor sandlock works on this machine{found}; fix one of them or set isolation=rlimits, which "
            "limits resources only: answers can read and write everything that this user can"
        )
