"""Runs one untrusted program in a process of its own, under resource limits.

This is the isolation level `rlimits`, and no more than that: the program has an empty environment, an empty directory,
no input, and bounds on memory, CPU, file size and time; its process group is killed and waited for. It can still read
what this user can read, write outside its directory, and use the network, and a process that leaves the group by
`setsid` outlives it. Namespaces, which close these doors, come with the full pipeline. `metrics.json` names the level.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from eval_pipeline.capture import Capture

ISOLATION_LEVEL = "rlimits"

_RUNNER = Path(__file__).with_name("runner.py")
_MB = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    wall_s: float = 30.0
    """Seconds from start to end, waiting included."""
    cpu_s: int = 30
    """Seconds of processor time, which does not count against a program on a busy machine."""
    memory_mb: int = 1024
    """Address space of each process."""
    file_mb: int = 16
    """Size of any file it writes."""
    num_processes: int = 4096
    """Processes and threads of this user, all others of the user's included; the kernel exempts root."""

    def rlimits(self) -> dict[str, tuple[int, int]]:
        """Soft and hard values by the names of the `resource` module."""
        return {
            "RLIMIT_AS": (self.memory_mb * _MB, self.memory_mb * _MB),
            # the soft limit's signal can be caught, so a second later the hard limit kills
            "RLIMIT_CPU": (self.cpu_s, self.cpu_s + 1),
            "RLIMIT_FSIZE": (self.file_mb * _MB, self.file_mb * _MB),
            "RLIMIT_NPROC": (self.num_processes, self.num_processes),
            "RLIMIT_CORE": (0, 0),
        }


@dataclass(frozen=True)
class Execution:
    """What was seen of a program from outside."""

    events: tuple[dict[str, Any], ...]
    """Events that carried this run's token, in order (see `runner.py`)."""
    exit_status: int
    """Exit code, or minus the signal that ended it."""
    wall_limit_hit: bool
    wall_s: float
    cpu_s: float
    output: str
    """The beginning of standard output and error, for a person to read."""


def run_program(code: str, tests: Sequence[str], limits: Limits) -> Execution:
    """Run an answer and its tests; returns when nothing of the process group is left.

    Args:
        code: the answer's Python source.
        tests: Python source of each test, run in order in the answer's namespace.
        limits: what the program may use.

    Raises:
        OSError: no process, pipe or temporary directory could be made on this machine.
    """
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="eval_", ignore_cleanup_errors=True) as directory, Capture() as capture:
        job = {
            "code": code,
            "tests": list(tests),
            "token": token,
            "report_fd": capture.report_fd,
            "limits": limits.rlimits(),
            "alarm_s": math.ceil(limits.wall_s) + 5,
        }
        with _job_file(job) as job_file:
            process = _start(job_file, directory, capture)
        return _watch(process, capture, limits, token)


def _job_file(job: dict[str, Any]) -> IO[bytes]:
    """An unnamed file, so that the answer finds no job to read in its directory."""
    file = tempfile.TemporaryFile()
    file.write(json.dumps(job).encode())
    file.seek(0)
    return file


def _start(job_file: IO[bytes], directory: str, capture: Capture) -> subprocess.Popen[bytes]:
    # the runner sets its own limits: a `preexec_fn` is not safe in a process with threads
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(_RUNNER)],
        stdin=job_file,
        stdout=capture.output_fd,
        stderr=capture.output_fd,
        pass_fds=[capture.report_fd],
        cwd=directory,
        env={},
        start_new_session=True,
    )


def _watch(process: subprocess.Popen[bytes], capture: Capture, limits: Limits, token: str) -> Execution:
    started = time.monotonic()
    try:
        ended = capture.read_until(lambda: _has_ended(process.pid), deadline=started + limits.wall_s)
    finally:
        status, cpu_s = _kill_and_wait(process)
    wall_s = time.monotonic() - started
    output, report = capture.drain()
    return Execution(_events(report, token), status, not ended, wall_s, cpu_s, output.decode(errors="replace"))


def _has_ended(pid: int) -> bool:
    # WNOWAIT leaves it a zombie, so that its process group cannot be reused before it is killed
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_and_wait(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Exit status and CPU seconds of the program, once its group is dead."""
    os.killpg(process.pid, signal.SIGKILL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime


def _events(report: bytes, token: str) -> tuple[dict[str, Any], ...]:
    prefix = f"{token} ".encode()
    # the last piece has no line end: it is empty, or a line that was cut off
    lines = report.split(b"\n")[:-1]
    return tuple(_event(line[len(prefix) :]) for line in lines if line.startswith(prefix))


def _event(line: bytes) -> dict[str, Any]:
    """One event; empty where an answer that got at the token wrote nonsense, which must not end the evaluation."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}
