"""A supervisor serves many answers: none finds traces of an earlier one or gets a different verdict because of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from eval_pipeline.judge import JudgeClient, ResourceLimits, Submission, runs
from eval_pipeline.judge.isolation import candidate_levels
from eval_pipeline.judge.sandbox import ReadWriteLock
from eval_pipeline.judge.server import JudgeWorker
from tests.helpers.hostile_answers import RIGHT, SCAN_MEMORY_FOR_NAMES, TEST
from tests.helpers.judge import (
    LASTING_PER_WORKER,
    RESULT_S,
    check_memory_of_the_next,
    function,
    judged,
    lasting,
    processes_of,
    script,
    serving,
    until_settled,
    youngest,
)
from tests.helpers.processes import wait_until

LIMITS = ResourceLimits(cpu_s=20, wall_s=120, memory_mb=512, num_processes=32)
LEAVES_MUCH = """
import os, resource, signal, sys, threading, time
os.environ["LEFT"] = "1"
os.putenv("LEFT", "1")
os.umask(0)
for path in ("/tmp", "/dev/shm"):
    open(path + "/left", "w").close()
    os.mkdir(path + "/folder", 0)
    os.chmod(path, 0o500)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
signal.setitimer(signal.ITIMER_REAL, 1000)
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
for number in range(10):
    if os.fork() == 0:
        os.setsid()
        if number % 2: os.kill(os.getpid(), signal.SIGSTOP)
        if os.fork(): os._exit(0)
        time.sleep(1000)
def f(x): return 2 * x
"""
STATE = """
import ctypes, hashlib, os, resource, signal, sys
libc = ctypes.CDLL(None)
def alive(pid):
    try: os.kill(pid, 0)
    except ProcessLookupError: return False
    return True
def kind(fd):
    try: return os.fstat(fd).st_mode, os.fstat(fd).st_size, os.lseek(fd, 0, 1) if fd == 0 else 0
    except OSError: return None
names = ("AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "MSGQUEUE", "NICE", "NOFILE", "NPROC", "RSS", "RTPRIO",
         "SIGPENDING", "STACK")
state = (
    [os.listdir(path) for path in ("/tmp", "/dev/shm", "/proc")],
    [oct(os.stat(path).st_mode) for path in ("/tmp", "/dev/shm")],
    dict(os.environ), libc.getenv(b"LEFT"), os.umask(0), os.getpriority(0, 0), os.getcwd(),
    os.getresuid(), os.getresgid(),
    [str(signal.getsignal(n)) for n in range(1, 32)], sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    signal.getitimer(0), signal.getitimer(1), signal.getitimer(2), signal.alarm(0), sorted(signal.sigpending()),
    [resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in names], os.uname().nodename,
    [pid for pid in range(2, 2000) if pid != os.getpid() and alive(pid)], [kind(fd) for fd in range(64)],
    os.sched_getscheduler(0), sorted(os.sched_getaffinity(0)), libc.personality(0xffffffff),
    [libc.prctl(option, 0, 0, 0, 0) for option in (3, 7, 21, 27, 30, 39, 42)], sorted(sys.modules),
    resource.getrusage(resource.RUSAGE_CHILDREN)[:2],
)
print(hashlib.sha256(repr(state).encode()).hexdigest())
"""
ATTACKS = {
    "terminals": "import os\ntry: os.chmod('/dev/pts/ptmx', 0)\nexcept OSError: pass\n",
    "signals": "import os, signal\nfor s in range(1, 65):\n    try: os.kill(1, s)\n    except OSError: pass\n",
    "limits": (
        "import resource\nfor limit in range(16):\n  for pid in (1, 2, 3):\n"
        "    try: resource.prlimit(pid, limit, (0, 0))\n    except (OSError, ValueError): pass\n"
    ),
    "processes": (
        "import os, time\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(1000)\nexcept OSError: pass\n"
    ),
    "mounts": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.umount2(b'/tmp', 2) == -1\n"
        "assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == -1\n"
    ),
    "queued signals": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\ninfo = ctypes.create_string_buffer(128)\n"
        "for s in range(1, 65):\n    ctypes.c_int.from_buffer(info).value = s\n"
        "    ctypes.c_int.from_buffer(info, 8).value = -1\n"
        "    for _ in range(50): libc.syscall(129, 1, s, info)\n"
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[JudgeClient]:
    """A server with namespaces and one worker."""
    with serving("bwrap", 1, LIMITS) as server:
        yield server


def called(server: JudgeClient, program: str, test: str = TEST) -> tuple[str, str]:
    """Error type and message of an answer with one test of its function."""
    return judged(server, function(program, test))


def test_memory_holds_nothing_of_earlier_answer(server: JudgeClient) -> None:
    check_memory_of_the_next(server, SCAN_MEMORY_FOR_NAMES)


def test_environment_holds_nothing_of_earlier_answer(server: JudgeClient) -> None:
    """An answer finds the same process state and files as the first answer on a fresh server."""
    state = script(STATE, ("", "nothing"))
    with serving("bwrap", 1, LIMITS) as fresh:
        expected = judged(fresh, state)
    assert expected[0] == "wrong_answer" and len(expected[1]) > 64, expected
    before = lasting(server)
    assert called(server, LEAVES_MUCH) == ("success", "")
    assert judged(server, state) == expected
    assert lasting(server) == before, "the supervisor was not the same"


@pytest.mark.parametrize("name", ATTACKS)
def test_attacked_supervisor_keeps_judging_correctly(server: JudgeClient, name: str) -> None:
    """After the attack, a correct and a wrong answer get their verdicts."""
    before = lasting(server)
    assert called(server, ATTACKS[name] + RIGHT) == ("success", "")
    assert called(server, RIGHT) == ("success", "")
    assert called(server, "def f(x): return 7")[0] == "wrong_answer"
    assert lasting(server) == before, "the supervisor was not the same"


def test_supervisor_is_replaced_after_limit(server: JudgeClient) -> None:
    """An answer that had to be killed may have exploited an unknown weakness."""
    before = lasting(server)
    submission = function("def f(x):\n    while True: pass\n", TEST)
    assert judged(server, submission, ResourceLimits(cpu_s=0.5))[0] == "timeout"
    assert lasting(server) != before


def test_dead_supervisor_is_replaced(server: JudgeClient) -> None:
    (supervisor,) = youngest(lasting(server))
    os.kill(supervisor, signal.SIGKILL)
    assert called(server, RIGHT) == ("success", "")
    assert supervisor not in lasting(server)


TESTERS_STAY = {
    "wrong": ("def f(x): return 0", "wrong_answer"),
    "error": ("def f(x): raise ValueError(x)", "runtime_error"),
    "no answer": ("def f(x", "syntax_error"),
    "exit": ("import os\ndef f(x): os._exit(0)", "runtime_error"),
    "stopped": ("def f(x):\n    while True: pass", "timeout"),
    "named tuple": (
        "import collections\ndef f(x): return collections.namedtuple('Point', 'x y')(x, x)",
        "wrong_answer",
    ),
}
TESTERS_GO = {
    "memory": ("def f(x): return 'x' * 50_000_000", "wrong_answer"),
    "garbage": (
        "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'x' * 99)\n    except OSError: pass\n" + RIGHT,
        "runtime_error",
    ),
}
POLLUTING = (
    "import math, random\nmath.sqrt = None\nrandom.seed = None\nassert f(1) == 2",
    "import builtins, sys\nbuiltins.sorted = None\nsys.setrecursionlimit(40)\nassert f(1) == 2",
    "import os, signal\nos.chdir('/')\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\nassert f(1) == 2",
)


@pytest.mark.parametrize("name", TESTERS_STAY)
def test_tester_is_reused_for_many_answers(server: JudgeClient, name: str) -> None:
    """Whatever the answers are, as long as their test leaves no trace."""
    before = lasting(server, "tester")
    program, expected = TESTERS_STAY[name]
    assert judged(server, function(program, TEST), ResourceLimits(cpu_s=1))[0] == expected
    assert lasting(server, "tester") == before


@pytest.mark.parametrize("name", TESTERS_GO)
def test_tester_tampered_with_by_answer_is_replaced(server: JudgeClient, name: str) -> None:
    """Neither its memory nor garbage on its connection may influence the next verdict."""
    before = youngest(lasting(server, "tester"))
    program, expected = TESTERS_GO[name]
    assert called(server, program)[0] == expected
    assert not before & lasting(server, "tester")


@pytest.mark.parametrize("test", POLLUTING)
def test_tester_changed_by_test_is_replaced(server: JudgeClient, test: str) -> None:
    """A test that changes its process is the last one there."""
    assert called(server, RIGHT, test) == ("success", "")
    later = (
        "import math, random, sys\nassert math.sqrt(4) == f(1) == sorted([2])[0]\nrandom.seed(1)\n"
        "assert sys.getrecursionlimit() > 500"
    )
    assert called(server, RIGHT, later) == ("success", "")


def test_random_numbers_do_not_depend_on_earlier_tests(server: JudgeClient) -> None:
    shows = "import random\nrandom.random()\nassert f(1) == random.random()"
    first, second = called(server, RIGHT, shows), called(server, RIGHT, shows)
    assert first == second and first[0] == "wrong_answer"
    seeds = "import random\nassert random.seed(0) or random.random() == f(0.8444218515250481) / 2"
    assert called(server, RIGHT, seeds) == ("success", "")
    is_seeded = "import random\nassert f(0.8444218515250481) / 2 == random.random()"
    assert called(server, RIGHT, is_seeded) == called(server, RIGHT, is_seeded) == ("success", "")


def test_time_of_earlier_tests_is_not_charged(server: JudgeClient) -> None:
    limits = ResourceLimits(cpu_s=1, wall_s=60)
    busy = function(RIGHT, "assert sum(range(20_000_000)) > f(1)")
    assert {judged(server, busy, limits) for _ in range(6)} == {("success", "")}


def test_dead_tester_is_replaced(server: JudgeClient) -> None:
    (tester,) = youngest(lasting(server, "tester"))
    os.kill(tester, signal.SIGKILL)
    one_less = LASTING_PER_WORKER["bwrap"] - 1
    assert until_settled(server, one_less) == one_less
    assert called(server, RIGHT) == ("success", "")
    assert tester not in lasting(server, "tester")


def test_killed_test_is_run_again(server: JudgeClient) -> None:
    """The kill is not the answer's fault."""
    assert called(server, RIGHT) == ("success", "")
    (tester,) = youngest(lasting(server, "tester"))
    slow = server.submit(function("import time\ndef f(x):\n    time.sleep(1)\n    return 2 * x", TEST))
    wait_until(lambda: len(processes_of(server)) > LASTING_PER_WORKER["bwrap"])
    os.kill(tester, signal.SIGKILL)
    assert slow.result(timeout=RESULT_S).error_type == "success"


@pytest.fixture
def worker() -> Iterator[JudgeWorker]:
    """A worker in this process, so that a test can look inside."""
    worker = JudgeWorker(candidate_levels("bwrap")[0], ReadWriteLock())
    yield worker
    worker.close()


def error_type(worker: JudgeWorker, submission: Submission, limits: ResourceLimits = LIMITS) -> str:
    return worker.judge(submission, limits).error_type


def test_idle_tester_survives(worker: JudgeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timers end with each test, so they do not kill the process while another answer needs no test."""
    monkeypatch.setattr(runs, "_EXTRA_TEST_S", 1.0)
    short = ResourceLimits(cpu_s=1, wall_s=1)
    assert error_type(worker, function(RIGHT, TEST), short) == "success"
    tester = worker._sandboxes._tester
    assert error_type(worker, script("import time\ntime.sleep(2.5)\nprint(2)")) == "success"
    assert error_type(worker, function(RIGHT, TEST), short) == "success"
    assert tester is not None and worker._sandboxes._tester is tester


def test_supervisor_is_replaced_after_maximum_number_of_answers(
    worker: JudgeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_MAX_ANSWERS", 2)
    kept = []
    for _ in range(4):
        assert error_type(worker, function(RIGHT, TEST)) == "success"
        kept.append(worker._sandboxes._supervisor is not None)
    assert kept == [True, False, True, False]


def test_failed_supervisor_is_replaced(worker: JudgeWorker) -> None:
    with pytest.raises(OSError, match="on the way"):
        with worker._sandboxes.runs_of(RIGHT, "", LIMITS):
            raise OSError("on the way")
    assert worker._sandboxes._supervisor is None
