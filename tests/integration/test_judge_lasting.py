"""A supervisor serves many answers: none finds anything of one before it, and none is judged differently for it."""

from __future__ import annotations

import os
import signal
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
from tests.integration.hostile_answers import CANARY, RIGHT, SCAN_MEMORY, TEST
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


def lasting(server: JudgeServer) -> set[int]:
    """The processes that stay from one answer to the next."""
    assert judged(server, RIGHT) == ("success", "")
    assert until_settled(server, LASTING_PER_WORKER) == LASTING_PER_WORKER
    return set(processes_of(server))


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
    of_answers = {pid for pid in lasting(server) if b'"role": "answer"' in Path(f"/proc/{pid}/cmdline").read_bytes()}
    parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in of_answers}
    (supervisor,) = of_answers - parents
    os.kill(supervisor, signal.SIGKILL)
    assert judged(server, RIGHT) == ("success", "")
    assert supervisor not in lasting(server)


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
