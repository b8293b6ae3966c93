"""A supervisor serves many answers: none finds anything of one before it, and none is judged differently for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval_pipeline.judge import workshop
from eval_pipeline.judge.client import JudgeServer
from eval_pipeline.judge.gate import Gate
from eval_pipeline.judge.judging import Worker
from eval_pipeline.judge.levels import candidates
from eval_pipeline.judge.limits import Limits
from eval_pipeline.judge.submission import Submission
from eval_pipeline.problems.problem import Case, FunctionTests, ProgramTests
from tests.helpers.hostile_answers import CANARY, RIGHT, SCAN_MEMORY, TEST
from tests.integration.test_judge_hostile import LASTING_PER_WORKER, processes_of, until_settled
from verl_ext.errors import UserError

LIMITS = Limits(cpu_s=20, wall_s=120, memory_mb=512, num_processes=32)
NAME = "KENNZEICHEN7351"
LEAVES_CANARIES = {
    "program": f"secret = '{CANARY}'  # {CANARY}\n" + RIGHT,
    "error": f"def f(x):\n    raise ValueError('{CANARY}')\n",
    "compiler": f"{CANARY} = 1\nglobal {CANARY}\n",
    "name": (
        "import ctypes, time\nlibc = ctypes.CDLL(None)\n"
        f"assert libc.prctl(15, b'{NAME}', 0, 0, 0) == 0\ntime.sleep(0.3)\n" + RIGHT
    ),
    "files": f"for path in ('/tmp/x', '/dev/shm/x'): open(path, 'w').write('{CANARY}')\n" + RIGHT,
}
ECHO = "import sys\ntext = sys.stdin.read()\nprint(text)\nsys.stderr.write(text * 1000)\n"
SCAN_WIDELY = SCAN_MEMORY.replace("2**23", "2**26").replace(
    'rb"[0-9]{20}")\nc', 'rb"[0-9]{20}|KENNZEICHEN[0-9]{4}")\nc'
)
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
def server() -> Iterator[JudgeServer]:
    """A server with namespaces and one worker."""
    try:
        server = JudgeServer("bwrap", num_workers=1, limits=LIMITS).__enter__()
    except UserError as error:
        pytest.skip(f"bwrap does not work on this machine: {error}")
    yield server
    server.__exit__(None, None, None)


def judged(server: JudgeServer, program: str, tests: FunctionTests | ProgramTests | None = None) -> tuple[str, str]:
    """Error type and message, of `f` where nothing else is said."""
    verdict = server.submit(Submission(program, tests or FunctionTests("f", (TEST,)))).result(timeout=300)
    return verdict.error_type, verdict.message


def lasting(server: JudgeServer, role: str = "answer") -> set[int]:
    """The processes in the sandbox of answers, or of tests, that stay from one answer to the next."""
    assert judged(server, RIGHT) == ("success", "")
    assert until_settled(server, LASTING_PER_WORKER) == LASTING_PER_WORKER
    mark = f'"role": "{role}"'.encode()
    return {pid for pid in processes_of(server) if mark in Path(f"/proc/{pid}/cmdline").read_bytes()}


def youngest(pids: set[int]) -> set[int]:
    """Those that are nobody's parents."""
    return pids - {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}


def test_nothing_of_an_answer_is_in_the_memory_of_the_next(server: JudgeServer) -> None:
    """Neither its program nor what it read and wrote, nor a name that it gave itself."""
    before = lasting(server)
    for program in LEAVES_CANARIES.values():
        judged(server, program)
    assert judged(server, ECHO, ProgramTests((Case(CANARY, CANARY),))) == ("success", "")
    assert "KENNZ" in SCAN_WIDELY and judged(server, SCAN_WIDELY) == ("success", "")
    assert lasting(server) == before, "the supervisor was not the same"


def test_nothing_of_an_answer_is_around_the_next(server: JudgeServer) -> None:
    """What the next can find out of its process and its surroundings is what the first one on a fresh server finds."""
    state = ProgramTests((Case("", "nothing"),))
    with JudgeServer("bwrap", num_workers=1, limits=LIMITS) as fresh:
        expected = judged(fresh, STATE, state)
    assert expected[0] == "wrong_answer" and len(expected[1]) > 64, expected
    before = lasting(server)
    assert judged(server, LEAVES_MUCH) == ("success", "")
    assert judged(server, STATE, state) == expected
    assert lasting(server) == before, "the supervisor was not the same"


@pytest.mark.parametrize("name", ATTACKS)
def test_attacked_supervisor_judges_on(server: JudgeServer, name: str) -> None:
    """A right answer after the attack, and a wrong one, get their verdicts."""
    before = lasting(server)
    assert judged(server, ATTACKS[name] + RIGHT) == ("success", "")
    assert judged(server, RIGHT) == ("success", "")
    assert judged(server, "def f(x): return 7")[0] == "wrong_answer"
    assert lasting(server) == before, "the supervisor was not the same"


def test_after_a_limit_the_supervisor_is_another(server: JudgeServer) -> None:
    """An answer that had to be stopped may have found something that we do not know of."""
    before = lasting(server)
    submission = Submission("def f(x):\n    while True: pass\n", FunctionTests("f", (TEST,)))
    assert server.submit(submission, Limits(cpu_s=0.5)).result(timeout=60).error_type == "timeout"
    assert lasting(server) != before


def test_dead_supervisor_is_replaced(server: JudgeServer) -> None:
    """The answer that it would have served is judged by another."""
    (supervisor,) = youngest(lasting(server))
    os.kill(supervisor, signal.SIGKILL)
    assert judged(server, RIGHT) == ("success", "")
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
def test_a_tester_serves_many(server: JudgeServer, name: str) -> None:
    """Whatever the answers are, while their test leaves nothing behind."""
    before = lasting(server, "tester")
    program, expected = TESTERS_STAY[name]
    submission = Submission(program, FunctionTests("f", (TEST,)))
    assert server.submit(submission, Limits(cpu_s=1)).result(timeout=300).error_type == expected
    assert lasting(server, "tester") == before


@pytest.mark.parametrize("name", TESTERS_GO)
def test_a_tester_that_an_answer_changed_goes(server: JudgeServer, name: str) -> None:
    """Its memory must not end the next answer's test, nor garbage be taken for the next answer's."""
    before = youngest(lasting(server, "tester"))
    program, expected = TESTERS_GO[name]
    assert judged(server, program)[0] == expected
    assert not before & lasting(server, "tester")


@pytest.mark.parametrize("test", POLLUTING)
def test_what_a_test_leaves_does_not_reach_the_next(server: JudgeServer, test: str) -> None:
    """It has its process to itself."""
    assert judged(server, RIGHT, FunctionTests("f", (test,))) == ("success", "")
    later = (
        "import math, random, sys\nassert math.sqrt(4) == f(1) == sorted([2])[0]\nrandom.seed(1)\n"
        "assert sys.getrecursionlimit() > 500"
    )
    assert judged(server, RIGHT, FunctionTests("f", (later,))) == ("success", "")


def test_random_numbers_of_a_test_start_anew(server: JudgeServer) -> None:
    """They do not depend on the tests before."""
    told = FunctionTests("f", ("import random\nrandom.random()\nassert f(1) == random.random()",))
    first, second = judged(server, RIGHT, told), judged(server, RIGHT, told)
    assert first == second and first[0] == "wrong_answer"
    told = FunctionTests("f", ("import random\nassert random.seed(0) or random.random() == f(0.8444218515250481) / 2",))
    assert judged(server, RIGHT, told) == ("success", "")
    shown = FunctionTests("f", ("import random\nassert f(0.8444218515250481) / 2 == random.random()",))
    assert judged(server, RIGHT, shown) == judged(server, RIGHT, shown) == ("success", "")


def test_an_idle_tester_stays(server: JudgeServer) -> None:
    """Past the time that its last test might have taken."""
    short = Limits(cpu_s=2, wall_s=0.5)
    submission = Submission(RIGHT, FunctionTests("f", (TEST,)))
    assert server.submit(submission, short).result(timeout=60).error_type == "success"
    before = lasting(server, "tester")
    assert server.submit(submission, short).result(timeout=60).error_type == "success"
    time.sleep(7)
    assert lasting(server, "tester") == before


def test_time_of_earlier_tests_does_not_count(server: JudgeServer) -> None:
    """Each may use as much itself as the limits say."""
    limits = Limits(cpu_s=1, wall_s=60)
    busy = FunctionTests("f", ("assert sum(range(20_000_000)) > f(1)",))
    verdicts = [server.submit(Submission(RIGHT, busy), limits).result(timeout=120) for _ in range(6)]
    assert {verdict.error_type for verdict in verdicts} == {"success"}, [verdict.message for verdict in verdicts]


def test_dead_tester_is_replaced(server: JudgeServer) -> None:
    """The answer that it would have tested is tested by another."""
    (tester,) = youngest(lasting(server, "tester"))
    os.kill(tester, signal.SIGKILL)
    assert until_settled(server, LASTING_PER_WORKER - 1) == LASTING_PER_WORKER - 1
    assert judged(server, RIGHT) == ("success", "")
    assert tester not in lasting(server, "tester")


@pytest.fixture
def worker() -> Iterator[Worker]:
    """In this process, so that a test can look inside."""
    worker = Worker(candidates("bwrap")[0], Gate())
    yield worker
    worker.close()


def test_a_supervisor_serves_a_limited_number(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then comes another one, in namespaces of its own."""
    monkeypatch.setattr(workshop, "_MOST_ANSWERS", 2)
    kept = []
    for _ in range(4):
        verdict = worker.judge(Submission(RIGHT, FunctionTests("f", (TEST,))), LIMITS)
        assert verdict.error_type == "success", verdict.message
        kept.append(worker._workshop._supervisor is not None)
    assert kept == [True, False, True, False]


def test_a_failure_ends_the_supervisor(worker: Worker) -> None:
    """Whatever went wrong on the way."""
    with pytest.raises(OSError, match="on the way"):
        with worker._workshop.runs(RIGHT, "", LIMITS):
            raise OSError("on the way")
    assert worker._workshop._supervisor is None
