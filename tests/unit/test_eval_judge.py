"""Answers judged for real, each in a process of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from eval_pipeline import sandbox
from eval_pipeline.judge import Submission, judge, judge_all
from eval_pipeline.sandbox import Limits, run_program
from eval_pipeline.verdict import Verdict

TESTS = ("assert add(1, 2) == 3", "assert add(-1, 1) == 0")
RIGHT = "def add(a, b):\n    return a + b\n"
# the CPU limit ends what loops; the wall limit is far off, so that a slow machine changes no verdict
QUICK = Limits(wall_s=60.0, cpu_s=1)


def verdict_on(code: str, *tests: str, limits: Limits = QUICK) -> Verdict:
    return judge(Submission(code, tests or TESTS), limits)


@pytest.mark.parametrize(
    ("code", "error_type", "num_passed"),
    [
        (RIGHT, "success", 2),
        ("def add(a, b):\n    return 3\n", "wrong_answer", 1),
        ("def add(a, b:\n", "syntax_error", 0),
        ("x = '\0'", "syntax_error", 0),
        ("(" * 5000, "syntax_error", 0),
        ("def plus(a, b):\n    return a + b\n", "runtime_error", 0),
        ("def add(a, b):\n    return a + c\n", "runtime_error", 0),
        ("def add(a, b):\n    return 3 if a == 1 else 1 // 0\n", "runtime_error", 1),
        ("def add(a, b):\n    assert a > 0\n    return a + b\n", "runtime_error", 1),
        ("raise KeyboardInterrupt", "runtime_error", 0),
        ("def add(a, b):\n    return int(input())\n", "runtime_error", 0),
    ],
)
def test_error_type_and_passed_tests(code: str, error_type: str, num_passed: int) -> None:
    verdict = verdict_on(code)
    assert (verdict.error_type, verdict.num_passed) == (error_type, num_passed)
    assert verdict.pass_ratio == num_passed / 2
    assert bool(verdict.message) == (error_type != "success")


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "print('success'); print('{\"event\": \"done\"}', flush=True); import os; os._exit(0)",
        "import os\ndef add(a, b):\n    os._exit(0)\n",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        # writes a report without the token on every descriptor, then leaves
        'import os\nfor fd in range(3, 20):\n    try:\n        os.write(fd, b\'x {"event": "passed"}\\n\' * 2)\n'
        "    except OSError:\n        pass\nos._exit(0)",
        # the child of a fork comes back out of the answer and must not report a second time
        "import os\nif os.fork():\n    os._exit(0)\n" + RIGHT,
    ],
)
def test_leaving_early_is_no_success(code: str) -> None:
    assert verdict_on(code).error_type == "runtime_error"


def test_replaced_builtins_do_not_change_the_verdict() -> None:
    code = (
        "import builtins, json, os\n"
        "builtins.exec = builtins.compile = lambda *a, **k: None\n"
        "builtins.AssertionError = KeyError\n"
        "os.write = lambda fd, line: len(line)\n"
        "def add(a, b):\n    return 7\n"
    )
    assert verdict_on(code).error_type == "wrong_answer"


def test_infinite_loop_is_a_timeout_by_processor_time() -> None:
    verdict = verdict_on("def add(a, b):\n    while a == -1:\n        pass\n    return 3\n")
    assert (verdict.error_type, verdict.num_passed) == ("timeout", 1)
    assert not verdict.starved


def test_catching_the_processor_signal_does_not_help() -> None:
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    pass\n"
    assert verdict_on(code).error_type == "timeout"


def test_sleep_is_a_timeout_that_calls_for_a_second_run() -> None:
    limits = Limits(wall_s=2.0, cpu_s=1)
    verdict = verdict_on("import time\ntime.sleep(1000)", limits=limits)
    assert (verdict.error_type, verdict.starved) == ("timeout", True)


def test_memory_bomb_is_a_runtime_error() -> None:
    verdict = verdict_on("block = bytearray(2 * 1024 ** 3)")
    assert verdict.error_type == "runtime_error"
    assert "MemoryError" in verdict.message


def test_output_flood_is_cut_and_does_not_block() -> None:
    execution = run_program("for _ in range(3000):\n    print('x' * 1000)\n" + RIGHT, TESTS, QUICK)
    assert len(execution.output) == 16 * 1024
    assert verdict_on("for _ in range(3000):\n    print('x' * 1000)\n" + RIGHT).error_type == "success"


def test_file_larger_than_the_limit_is_refused() -> None:
    code = "with open('big', 'wb') as file:\n    file.write(bytes(17 * 1024 * 1024))\n"
    assert verdict_on(code).error_type == "runtime_error"


def test_closed_output_does_not_end_the_run() -> None:
    assert verdict_on("import os\nos.close(1)\nos.close(2)\n" + RIGHT).error_type == "success"


def test_child_that_outlives_the_answer_is_killed(tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    while True:\n"
        f"        open({str(beat)!r}, 'a').write('x')\n"
        "        time.sleep(0.01)\n"
        f"while not os.path.exists({str(beat)!r}):\n    time.sleep(0.01)\n" + RIGHT
    )
    assert verdict_on(code).error_type == "success"
    beats = beat.stat().st_size
    time.sleep(0.2)
    assert beat.stat().st_size <= beats + 1


def test_answer_sees_no_environment_and_an_empty_directory_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    code = "import os\nprint(os.getcwd(), os.listdir(), 'WANDB_API_KEY' in os.environ, flush=True)\n"
    directory, *rest = run_program(code, ["assert True"], QUICK).output.split()
    assert rest == ["[]", "False"]
    assert not os.path.exists(directory)


def test_each_test_runs_in_the_answers_module() -> None:
    code = (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int' = 1\n"
        "if __name__ == '__main__':\n    1 / 0\n"
    )
    assert verdict_on(code, "assert P().x == 1", "assert P.__module__ == 'answer'").error_type == "success"


def test_sandbox_that_cannot_start_is_an_api_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "_RUNNER", tmp_path / "gone.py")
    verdict = verdict_on(RIGHT)
    assert verdict.error_type == "api_error"
    assert "gone.py" in verdict.message


def test_missing_answer_is_an_api_error_that_is_not_run() -> None:
    verdict = judge(Submission("", TESTS, error="The prompt is too long."), QUICK)
    assert (verdict.error_type, verdict.message, verdict.judge_s) == ("api_error", "The prompt is too long.", 0.0)


def test_verdicts_come_in_the_order_of_the_submissions() -> None:
    codes = [RIGHT, "1 / 0", "def add(a, b):\n    return 3\n", "def"] * 2
    verdicts = judge_all([Submission(code, TESTS) for code in codes], QUICK, num_workers=4)
    expected = ["success", "runtime_error", "wrong_answer", "syntax_error"] * 2
    assert [verdict.error_type for verdict in verdicts] == expected
