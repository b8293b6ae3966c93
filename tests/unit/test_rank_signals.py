"""How a rank handles signals, including while its main thread is inside one long call, and how it exits."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from tests.helpers import ROOT
from verl_ext.errors import STOP_SIGNALS

PROGRAM = """
    import hashlib, sys, time
    from verl_ext.errors import STOP_SIGNALS
    from verl_ext.processes import StopSignals
    from verl_ext.trainer.__main__ import end_at_first_signal

    end_at_first_signal()
    signals = StopSignals(STOP_SIGNALS)
    if sys.argv[1] == "arm":
        signals.install()
    for line in sys.stdin:
        if line == "busy\\n":
            print("busy", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[2]))  # no Python code runs in the main thread
        while line == "wait\\n" and not signals.received:
            time.sleep(0.01)
        print(signals.received[0].name if signals.received else None, flush=True)
"""
ABOUT_THREE_SECONDS, ENDLESS = "6000000", "2000000000"


@pytest.fixture
def start() -> Iterator[object]:
    processes = []

    def run(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), *words]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes.append(subprocess.Popen(command, cwd=ROOT, text=True, bufsize=1, **pipes))
        assert ask(processes[-1], "now") == "None"  # it has come as far as reading its input
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.wait()


def ask(process: subprocess.Popen[str], word: str) -> str:
    process.stdin.write(f"{word}\n")
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_before_training_ends_rank(number: signal.Signals, start: object) -> None:
    process = start("start", ENDLESS)
    assert ask(process, "busy") == "busy"
    process.send_signal(number)
    assert process.wait(timeout=60) == -number


def test_two_signals_during_long_call_are_one_request(start: object) -> None:
    process = start("arm", ABOUT_THREE_SECONDS)
    assert ask(process, "busy") == "busy"
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)  # a handler run after the call would see both much later
    assert process.stdout.readline() in ("SIGUSR1\n", "SIGTERM\n")
    assert ask(process, "now") in ("SIGUSR1", "SIGTERM")
    assert process.poll() is None


def test_repeated_signals_to_rank_are_one_request(start: object) -> None:
    process = start("arm", ABOUT_THREE_SECONDS)
    process.send_signal(signal.SIGTERM)
    assert ask(process, "wait") == "SIGTERM"
    assert ask(process, "busy") == "busy"
    for _ in range(3):
        for number in STOP_SIGNALS:
            process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)  # more than a second in all
    assert process.stdout.readline() == "SIGTERM\n"
    assert ask(process, "now") == "SIGTERM"


@pytest.mark.parametrize(("has_engine", "printed"), [(True, "last line\n"), (False, "last line\nthread\natexit\n")])
def test_rank_leaves_without_destructors(has_engine: bool, printed: str) -> None:
    """With vLLM on a GPU, both of which are mocked, also without exit handlers."""
    program = """
        import atexit, sys, threading
        import torch
        from verl_ext.trainer.__main__ import leave

        class Kept:
            def __del__(self):
                print("destructor")

        kept, is_ending = Kept(), threading.Event()
        threading.Thread(target=lambda: is_ending.wait() and print("thread"), daemon=sys.argv[1] == "True").start()
        threading._register_atexit(is_ending.set)
        atexit.register(print, "atexit")
        torch.cuda.is_initialized = lambda: True
        if sys.argv[1] == "True":
            sys.modules["vllm"] = sys
        print("last line")
        leave(75)
    """
    words = [sys.executable, "-c", textwrap.dedent(program), str(has_engine)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (75, printed), done.stderr
