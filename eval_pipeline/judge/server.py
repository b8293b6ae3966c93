"""The process that owns all sandboxes: reads submissions from its input, writes verdicts as they are found.

`python -m eval_pipeline.judge.server OPTIONS` with OPTIONS a JSON object; started by `client.py`. It ends when its
input does, and every sandbox ends with it.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import select
import threading
import traceback
import warnings
from typing import Any

from eval_pipeline.config import JudgeLimits
from eval_pipeline.judge.gate import Gate
from eval_pipeline.judge.inside import frames
from eval_pipeline.judge.judging import Worker
from eval_pipeline.judge.levels import Level, candidates
from eval_pipeline.judge.packages import Package
from eval_pipeline.judge.rules import MESSAGE_CHARS
from eval_pipeline.judge.sandbox import STARTS
from eval_pipeline.judge.submission import Submission
from eval_pipeline.judge.verdict import Verdict
from eval_pipeline.judge.wire import dump_verdict, load_submission, num_tests_of
from eval_pipeline.problems.problem import FunctionTests
from verl_ext.cli import child_process_args
from verl_ext.commands import program

_PARENT_CHECK_S = 1.0
_MOST_OPEN_FILES = 1 << 16
"""No more: processes of the sandboxes close that many when they start."""
_PROBE = Submission("def f(x):\n    return x + 1\n", FunctionTests("f", ("assert f(1) == 2",)))


def main() -> None:
    """Find the isolation level, then serve until the input ends."""
    [words] = child_process_args(
        "eval_pipeline.judge.server",
        "Owns the sandboxes that programs are judged in.",
        f"{program('judge')} --dataset humaneval --answers answers.jsonl --output verdicts.jsonl",
        "options",
    )
    options = json.loads(words)
    # of the tests, which this process compiles: nobody here can do anything about them
    warnings.simplefilter("ignore", SyntaxWarning)
    _allow_open_files()
    output = Output(os.dup(1))
    os.dup2(2, 1)
    level, reasons = _find_level(options["isolation"], tuple(Package(**package) for package in options["packages"]))
    if level is None:
        output.write({"refused": reasons})
        return
    output.write({"isolation": level.name, "reasons": reasons})
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    gate = Gate()
    for _ in range(options["num_workers"]):
        threading.Thread(target=_work, args=(jobs, level, gate, output), daemon=True).start()
    _read_jobs(jobs, os.getppid())
    _end(0)


def _end(status: int) -> None:
    """End this process, which ends its sandboxes, but not while one of them is starting."""
    with STARTS.alone():
        os._exit(status)


def _allow_open_files() -> None:
    """Each worker holds several, and a machine may have hundreds of processors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))


class Output:
    """Where verdicts go."""

    def __init__(self, fd: int) -> None:
        """Write to an open file."""
        self._fd = fd
        self._lock = threading.Lock()

    def write(self, message: dict[str, Any]) -> None:
        """Write one message whole; the process ends when nobody reads any more."""
        data = frames.pack(message)
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except BrokenPipeError:
                _end(0)


def _find_level(isolation: str, packages: tuple[Package, ...]) -> tuple[Level | None, list[str]]:
    """The first level at which a right answer is judged right, and why the ones before it were not taken."""
    reasons: list[str] = []
    for level in candidates(isolation, packages):
        worker = Worker(level, Gate())
        verdict = worker.judge(_PROBE, JudgeLimits())
        worker.close()
        if verdict.error_type == "success":
            return level, reasons
        reasons.append(f"{level.name}: {' '.join(verdict.message.split())[-200:]}")
    return None, reasons


def _work(jobs: queue.SimpleQueue[dict[str, Any]], level: Level, gate: Gate, output: Output) -> None:
    worker = Worker(level, gate)
    while True:
        message = jobs.get()
        num_tests = 1
        try:
            submission, limits = load_submission(message)
            num_tests = max(1, num_tests_of(submission.tests))
            verdict = worker.judge(submission, limits)
        except BaseException as error:
            # a fault of the judge itself costs this one submission and the worker's sandboxes, not the server
            traceback.print_exc()
            verdict = Verdict("api_error", 0, num_tests, f"the judge failed: {error!r}"[:MESSAGE_CHARS])
            _close(worker)
            worker = Worker(level, gate)
        output.write({"id": message["id"], "verdict": dump_verdict(verdict)})


def _close(worker: Worker) -> None:
    try:
        worker.close()
    except BaseException:  # what is left of it ends with this process
        traceback.print_exc()


def _read_jobs(jobs: queue.SimpleQueue[dict[str, Any]], parent: int) -> None:
    """Hand out submissions until the input ends.

    The parent is looked after too: its input does not end while another child of it holds a copy.
    """
    while os.getppid() == parent:
        if not select.select([0], [], [], _PARENT_CHECK_S)[0]:
            continue
        received = frames.read(0)
        if received is None:
            return
        jobs.put(received[0])


if __name__ == "__main__":
    main()
