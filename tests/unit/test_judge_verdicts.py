"""The verdict on each kind of answer, at every isolation level that works on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from eval_pipeline.judge import (
    JudgeClient,
    ProgramCase,
    ReferenceAnswer,
    ResourceLimits,
    RunReport,
    Submission,
    Verdict,
)
from eval_pipeline.judge.types import FunctionOutcome
from eval_pipeline.judge.verdicts import judge_function_run, judge_program_run, outputs_match
from tests.helpers.judge import LEVELS, function, script, serving, submit_all

LIMITS = ResourceLimits(cpu_s=5, wall_s=60, memory_mb=768)
SHORT = replace(LIMITS, cpu_s=0.5)
"""Of answers that must time out."""

FUNCTIONS = {
    "right": ("def f(x): return x + 1", "success"),
    "wrong": ("def f(x): return x", "wrong_answer"),
    "none": ("def f(x): pass", "wrong_answer"),
    "does not parse": ("def f(x:", "syntax_error"),
    "null byte": ("def f(x): return 2\0", "syntax_error"),
    "lone surrogate": ("def f(x): return '\ud800'", "syntax_error"),
    "return outside": ("return 2", "syntax_error"),
    "deep nesting": ("x = " + "(" * 5000 + ")" * 5000, "syntax_error"),
    "deep operators": ("x = " + "-" * 200000 + "1", "syntax_error"),
    "raises": ("def f(x): raise ValueError('no')", "runtime_error"),
    "raises at import": ("1 / 0", "runtime_error"),
    "raises an assertion": ("def f(x): assert False", "runtime_error"),
    "an assertion of its own": ("class E(AssertionError): pass\ndef f(x): raise E", "runtime_error"),
    "leaves": ("import sys\ndef f(x): sys.exit(0)", "runtime_error"),
    "exits at import": ("import sys\nsys.exit(0)", "runtime_error"),
    "ends the process": ("import os\ndef f(x): os._exit(0)", "runtime_error"),
    "nothing": ("", "syntax_error"),
    "defines nothing": ("x = 1", "runtime_error"),
    "no such module": ("import numpy_that_is_not_there\ndef f(x): return 2", "runtime_error"),
    "endless loop": ("def f(x):\n    while True: pass", "timeout"),
    "endless loop at import": ("while True: pass", "timeout"),
    "endless recursion": ("def f(x): return f(x)", "runtime_error"),
    "too much memory": ("def f(x): return len([0] * 10**9)", "runtime_error"),
    "main block": ("def f(x): return x + 1\nif __name__ == '__main__': raise SystemExit(1)", "success"),
    "prints": ("def f(x):\n    print('hello')\n    return x + 1", "success"),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    b: int\ndef f(x): return A(2).b",
        "success",
    ),
    "segfault": ("import ctypes\ndef f(x): ctypes.string_at(0)", "runtime_error"),
}

UNLIMITED_STACK = """
import resource, sys, threading
resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""
SCRIPTS = {
    "right": ("print(int(input()) + 1)", "success"),
    "stdin": ("import sys\nprint(int(sys.stdin.readline()) + 1)", "success"),
    "open(0)": ("print(int(open(0).read()) + 1)", "success"),
    "stdin bytes": ("import sys\nprint(int(sys.stdin.buffer.read()) + 1)", "success"),
    "os.read": ("import os\nos.write(1, b'%d' % (int(os.read(0, 9)) + 1))", "success"),
    "exit": ("print(2); exit()", "success"),
    "sys.exit(0)": ("import sys\nprint(2)\nsys.exit(0)", "success"),
    "exit hook": ("import atexit\natexit.register(print, 2)", "success"),
    "main": ("def main(): print(2)\nif __name__ == '__main__': main()", "success"),
    "wrong": ("print(3)", "wrong_answer"),
    "nothing": ("", "syntax_error"),
    "prints nothing": ("x = input()", "wrong_answer"),
    "does not parse": ("print(", "syntax_error"),
    "sys.exit(1)": ("import sys\nprint(2)\nsys.exit(1)", "runtime_error"),
    "exit with a text": ("print(2)\nraise SystemExit('bad')", "runtime_error"),
    "raises": ("print(2)\n1 / 0", "runtime_error"),
    "reads past the end": ("input(); input()", "runtime_error"),
    "segfault": ("import ctypes; print(2, flush=True); ctypes.string_at(0)", "runtime_error"),
    "kills itself": ("import os; print(2, flush=True); os.kill(os.getpid(), 9)", "runtime_error"),
    "endless loop": ("while True: pass", "timeout"),
    "endless output": ("while True: print('2' * 1000)", "timeout"),
    "much output": ("print('2 ' * 5_000_000)", "wrong_answer"),
    "thread": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(64 * 2**20)\n"
        "def main():\n    def depth(n): return n and 1 + depth(n - 1)\n    print(depth(50000) - 49998)\n"
        "threading.Thread(target=main).start()",
        "success",
    ),
    "unlimited stack": (UNLIMITED_STACK + "print(2)", "success"),
    "unlimited stack of a thread": (
        UNLIMITED_STACK + "sys.setrecursionlimit(10**7)\nthreading.stack_size(2**27)\n"
        "def depth(n): return n and 1 + depth(n - 1)\n"
        "thread = threading.Thread(target=lambda: print(depth(50000) - 49998))\nthread.start()\nthread.join()",
        "success",
    ),
    "threads with stacks as large as the memory": (
        "import threading\nthreading.stack_size(2**30)\n"
        "thread = threading.Thread(target=print, args=(2,))\nthread.start()\nthread.join()",
        "success",
    ),
    "stack of 512 MB": ("import resource as r\nr.setrlimit(r.RLIMIT_STACK, [2**29, -1])\nprint(2)", "success"),
    "other limits that stay": (
        "import resource as r\nlimits = r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_NOFILE, r.RLIMIT_FSIZE, r.RLIMIT_CORE\n"
        "before = [*map(r.getrlimit, limits)]\n"
        "for limit in limits:\n    r.setrlimit(limit, (-1, -1))\n    r.prlimit(0, limit, (2**60, -1))\n"
        "assert [*map(r.getrlimit, limits)] == before\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (20, 30))\nassert r.getrlimit(r.RLIMIT_NOFILE) == (20, 30)\nprint(2)",
        "success",
    ),
    "a limit below itself": ("import resource as r\nr.setrlimit(r.RLIMIT_NOFILE, (20, 10))\nprint(2)", "runtime_error"),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**6)\ndef depth(n): return n and 1 + depth(n - 1)\n"
        "print(depth(50000) - 49998)",
        "success",
    ),
    "temporary file": (
        "import tempfile\nwith tempfile.TemporaryFile() as file:\n    file.write(b'2'); file.seek(0)\n"
        "    print(file.read().decode())",
        "success",
    ),
    "copied files": (
        "import os, shutil\nopen('a', 'w').write('2')\nshutil.copy('a', 'b')\nshutil.copy2('b', 'c')\n"
        "os.mkdir('d')\nshutil.copytree('d', 'e')\nos.chmod('c', 0o600)\nprint(open('c').read())",
        "success",
    ),
    "process pool": (
        "import multiprocessing\ndef g(x): return x + 1\nif __name__ == '__main__':\n"
        "    with multiprocessing.Pool(2) as pool: print(pool.map(g, [1])[0])",
        "success",
    ),
    "many threads": (
        "import time\nfrom concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(40) as pool:\n"
        "    print(len({*pool.map(lambda n: time.sleep(0.01) or n % 2, range(400))}))",
        "success",
    ),
    "/dev/stdin": ("print(int(open('/dev/stdin').read()) + 1)", "success"),
    "/dev/stdin by pathlib": ("import pathlib\nprint(int(pathlib.Path('/dev/stdin').read_text()) + 1)", "success"),
    "/dev/stdout": ("with open('/dev/stdout', 'w') as file: file.write('2')", "success"),
    "__file__": ("import os\nos.chdir(os.path.dirname(__file__))\nprint(2)", "success"),
    "empty environment": ("import os\nprint(2 if not os.environ else os.environ)", "success"),
}


OTHERS: dict[str, tuple[Submission, ResourceLimits]] = {
    "the worst counts": (
        function(
            "def f(x):\n    if x == 3: raise ValueError\n    return 2 if x % 2 else 4",
            *("assert f(0) == 0", "assert f(1) == 2", "assert f(3) == 2", "assert f(2) == 4"),
        ),
        LIMITS,
    ),
    "after a timeout": (
        script("x = int(input())\nwhile x == 2: pass\nprint(2)", ("1", "2"), ("2", "2"), ("1", "2")),
        SHORT,
    ),
    "independent": (
        function(
            "import os\nn = 0\ndef f(x):\n    global n\n    n += 1\n    open(f'file{n}', 'x').close()\n"
            "    return len(os.listdir('.')) + n",
            *["assert f(1) == 2"] * 3,
        ),
        LIMITS,
    ),
    "sleeps": (function("import time\ndef f(x): time.sleep(100)"), replace(LIMITS, cpu_s=1, wall_s=1)),
    "its test calls it for ever": (function("def f(x): return 2", "while f(1): pass"), replace(LIMITS, wall_s=1)),
    "within the tolerance": (script("print(0.1 + 0.2)", ("", "0.3"), tolerance=1e-6), LIMITS),
    "without a tolerance": (script("print(0.1 + 0.2)", ("", "0.3")), LIMITS),
    "unicode in a program": (script("print(input()[::-1] + 'é')", ("añb", "bñaé")), LIMITS),
    "unicode in a function": (function("def f(x): return x + 'é'", "assert f('ñ\\ud800') == 'ñ\\ud800é'"), LIMITS),
    "as the reference": (Submission("so the answer is 42", ReferenceAnswer("42")), LIMITS),
    "not as the reference": (Submission("so the answer is 43", ReferenceAnswer("42")), LIMITS),
}


def submissions() -> dict[str, tuple[Submission, ResourceLimits]]:
    """Every case of this file by a unique name."""
    kinds = (("function", function, FUNCTIONS), ("script", script, SCRIPTS))
    return OTHERS | {
        f"{kind} {name}": (make(program), SHORT if expected == "timeout" else LIMITS)
        for kind, make, cases in kinds
        for name, (program, expected) in cases.items()
    }


Judged = Callable[[str], Verdict]


@pytest.fixture(scope="module", params=LEVELS)
def server(request: pytest.FixtureRequest) -> Iterator[JudgeClient]:
    """A server at each isolation level."""
    with serving(request.param, 8, LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def judged(server: JudgeClient) -> Judged:
    """The verdict on a case; all cases are judged concurrently."""
    return submit_all(server, submissions())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_answer_gets_expected_verdict(judged: Judged, name: str) -> None:
    """The test is `assert f(1) == 2`."""
    verdict, expected = judged(f"function {name}"), FUNCTIONS[name][1]
    assert (verdict.error_type, verdict.num_tests) == (expected, 1), verdict.message
    assert verdict.num_passed == (expected == "success")
    assert (verdict.message == "") == (expected == "success")


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_answer_gets_expected_verdict(server: JudgeClient, judged: Judged, name: str) -> None:
    """The program must print 2 for the input 1."""
    if name == "process pool" and server.isolation == "sandlock":
        pytest.skip("its semaphores are files in /dev/shm, which all processes share and this level closes")
    verdict, expected = judged(f"script {name}"), SCRIPTS[name][1]
    assert (verdict.error_type, verdict.num_tests) == (expected, 1), verdict.message
    assert verdict.num_passed == (expected == "success")


def test_every_test_runs_and_worst_result_counts(judged: Judged) -> None:
    """Wrong, right, an exception, right: two of four pass, and type and message are those of the exception."""
    verdict = judged("the worst counts")
    assert (verdict.error_type, verdict.num_passed, verdict.num_tests) == ("runtime_error", 2, 4)
    assert verdict.message.startswith("test 3: ValueError") and "assert f(3) == 2" in verdict.message


def test_no_test_runs_after_timeout(judged: Judged) -> None:
    """The three tests: one passes, one loops, and one would pass."""
    verdict = judged("after a timeout")
    assert (verdict.error_type, verdict.num_passed, verdict.num_tests) == ("timeout", 1, 3)


def test_tests_are_independent(judged: Judged) -> None:
    """Neither globals nor files of one run are visible in the next."""
    verdict = judged("independent")
    assert (verdict.error_type, verdict.num_passed) == ("success", 3), verdict.message


def test_sleeping_answer_times_out(judged: Judged) -> None:
    """The wall clock limit stops an answer that uses no CPU time."""
    assert judged("sleeps").error_type == "timeout"


def test_hanging_test_is_a_timeout(judged: Judged) -> None:
    assert judged("its test calls it for ever").error_type == "timeout"


def test_hanging_test_is_not_repeated() -> None:
    """It used up its CPU time, so the timeout is not due to a busy machine."""
    limits = ResourceLimits(cpu_s=100, wall_s=10)
    report = RunReport("ended", exit_code=-9, cpu_s=0, wall_s=limits.test_cpu_s)
    result = judge_function_run(report, FunctionOutcome("died", "why"), limits)
    assert (result.error_type, result.is_doubtful) == ("timeout", False)
    early = judge_function_run(replace(report, wall_s=1), FunctionOutcome("died", "why"), limits)
    assert (early.error_type, early.is_doubtful) == ("runtime_error", True)


@pytest.mark.parametrize(
    ("idle_s", "waited_s", "is_doubtful"), [(9.9, 9.8, False), (2, 9.8, True), (9.9, 2, True), (0, 0, True)]
)
def test_only_run_that_may_be_starved_is_repeated(idle_s: float, waited_s: float, is_doubtful: bool) -> None:
    """A run that hit the wall-clock limit is not, if it slept while its test waited for it."""
    limits = ResourceLimits(cpu_s=10, wall_s=10)
    report = RunReport("wall", exit_code=-9, cpu_s=0, wall_s=10, idle_s=idle_s)
    outcome = FunctionOutcome("lost", "the other side is gone", waited_s)
    result = judge_function_run(report, outcome, limits)
    assert (result.error_type, result.is_doubtful) == ("timeout", is_doubtful)
    result = judge_program_run(report, ProgramCase("", ""), partial(outputs_match, tolerance=None), limits)
    assert (result.error_type, result.is_doubtful) == ("timeout", idle_s < 8)


def test_numbers_may_differ_within_tolerance(judged: Judged) -> None:
    assert judged("within the tolerance").error_type == "success"
    assert judged("without a tolerance").error_type == "wrong_answer"


LINES = "line\n" * 100


@pytest.mark.parametrize(
    ("actual", "expected", "says"),
    [
        (f"{LINES}43\n", f"{LINES}42\n", "line 101: printed '43', expected '42'"),
        (f"\n{LINES}43", f"{LINES}42", "line 101: printed '43', expected '42'"),
        (LINES, f"{LINES}42", "line 101: printed '', expected '42'"),
        (f"{LINES}42\n43", f"{LINES}42", "line 102: printed '43', expected ''"),
        (
            f"{LINES}1.0\n43{LINES * 900}",
            f"{LINES}1.00\n42 \n{LINES * 900}",
            "line 102: printed '43line', expected '42 '",
        ),
        ("7 " * 100 + "43 8", "7 " * 100 + "42 8", "line 1, word 101: printed '43', expected '42'"),
        ("1 2", "1 3", "printed '1 2', expected '1 3'"),
        (f"43\n{LINES}", f"42\n{LINES}", r"printed '43\nline\nline"),
    ],
)
def test_message_shows_where_outputs_differ(actual: str, expected: str, says: str) -> None:
    report = RunReport("exited", exit_code=0, cpu_s=0, wall_s=0, stdout=actual.encode())
    match = partial(outputs_match, tolerance=1e-6)
    result = judge_program_run(report, ProgramCase("", expected), match, ResourceLimits())
    assert result.error_type == "wrong_answer" and result.message.startswith(says)


def test_message_says_that_output_was_cut_off(judged: Judged) -> None:
    message = judged("script much output").message
    assert message.startswith("test 1: the output was cut off at the judge's limit of 4 MiB; printed '2 2")


@pytest.mark.parametrize("kind", ["program", "function"])
def test_unicode_is_preserved(judged: Judged, kind: str) -> None:
    """In input, output, program and arguments."""
    assert judged(f"unicode in a {kind}").error_type == "success"


def test_answer_is_compared_with_reference(judged: Judged) -> None:
    assert judged("as the reference").error_type == "success"
    verdict = judged("not as the reference")
    assert (verdict.error_type, verdict.num_tests) == ("wrong_answer", 1)
    assert "42" in verdict.message
