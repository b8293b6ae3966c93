"""The launcher under signals and crashes, with small programs in place of the trainer under real torchrun."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import ROOT
from tests.helpers.processes import family_of

TIMEOUT_S = 120


class Launcher:
    """A started launcher, its output in files."""

    def __init__(self, words: list[str], directory: Path, environment: dict[str, str], **options: Any) -> None:
        self.paths = {name: directory / name for name in ("out", "err")}
        streams = {"stdout": self.paths["out"].open("w"), "stderr": self.paths["err"].open("w"), **options}
        self.process = subprocess.Popen(words, cwd=ROOT, env={**os.environ, **environment}, **streams)
        self.seen: list[psutil.Process] = []

    def output(self, name: str = "out") -> str:
        return self.paths[name].read_text()

    def wait_for(self, is_so: Callable[[], object]) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not is_so():
            assert self.process.poll() is None, self.output("err")
            assert time.monotonic() < end, self.output() + self.output("err")
            self.note_children()
            time.sleep(0.02)

    def note_children(self) -> None:
        if self.process.poll() is None:
            self.seen = family_of(self.process) or self.seen

    def end(self) -> int:
        """Wait for the exit code; no rank may be left, and nobody may have seen a traceback."""
        self.note_children()
        code = self.process.wait(TIMEOUT_S)
        _, alive = psutil.wait_procs(self.seen, timeout=10)
        assert not alive
        assert "Traceback" not in self.output() + self.output("err")
        return code

    def clean_up(self) -> None:
        self.note_children()
        self.process.kill()
        self.process.wait()
        for process in self.seen:
            if process.is_running():
                process.kill()


Start = Callable[..., Launcher]


@pytest.fixture
def started() -> Iterator[list[Launcher]]:
    launchers: list[Launcher] = []
    yield launchers
    for launcher in launchers:
        launcher.clean_up()


@pytest.fixture
def start(started: list[Launcher], tmp_path: Path) -> Start:
    """Starts `small_launch` in the run directory `tmp_path/run`."""

    def start_ranks(
        behaviour: str,
        *,
        grace_s: float = 60,
        restarts: int = 0,
        pause_s: float = 0.1,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> Launcher:
        run_dir, files = tmp_path / "run", tmp_path / f"files{len(started)}"
        run_dir.mkdir(exist_ok=True)
        files.mkdir()
        words = [sys.executable, "-m", "tests.ranks.small_launch", str(run_dir)]
        words += [str(grace_s), str(restarts), str(pause_s)]
        started.append(Launcher(words, files, {"SMALL_RANKS": behaviour, **(environment or {})}, **options))
        return started[-1]

    return start_ranks


def record(tmp_path: Path) -> dict:
    path = tmp_path / "run/run.json"
    return json.loads(path.read_text()) if path.exists() else {"status": None, "attempts": []}


def last_reason(tmp_path: Path) -> str:
    return record(tmp_path)["attempts"][-1]["exit_reason"]


def wait_until_ready(launcher: Launcher, tmp_path: Path, *ranks: int) -> None:
    launcher.wait_for(lambda: all((tmp_path / f"run/ready_{rank}").exists() for rank in ranks or (0, 1)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_the_launcher_reaches_every_rank(number: signal.Signals, start: Start, tmp_path: Path) -> None:
    launcher = start("stop_when_one_is_asked")
    wait_until_ready(launcher, tmp_path)
    launcher.process.send_signal(number)
    assert launcher.end() == 75
    assert launcher.output().splitlines()[1:] == [
        f"{number.name}: saving at the next step boundary, for at most 60 s; a second signal stops at once",
        f"Stopped by {number.name} after step 7; the same command goes on from there.",
    ]
    assert launcher.output("err") == ""
    assert record(tmp_path)["status"] == "stopped"


def test_a_signal_to_one_rank_stops_all(start: Start, tmp_path: Path) -> None:
    launcher = start("stop_when_one_is_asked", restarts=3)
    wait_until_ready(launcher, tmp_path)
    os.kill(int((tmp_path / "run/ready_1").read_text()), signal.SIGUSR1)
    assert launcher.end() == 75
    starting, stopped = launcher.output().splitlines()
    assert starting.startswith("Starting small (sft) on 2 ranks; ")
    assert stopped == "Stopped by SIGUSR1 after step 7; the same command goes on from there."
    assert record(tmp_path)["status"] == "stopped"


def test_ranks_that_take_too_long_are_killed(start: Start, tmp_path: Path) -> None:
    launcher = start("ignore_everything", grace_s=1.5)
    wait_until_ready(launcher, tmp_path)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 75
    assert launcher.output("err") == (
        "error: killed, not having saved within trainer.preemption.grace_s=1.5 s of SIGTERM; "
        "the same command begins at step 0, and a larger grace_s gives a save more time\n"
    )
    assert record(tmp_path)["status"] == "stopped"
    assert "trainer.preemption.grace_s=1.5" in last_reason(tmp_path)


def test_a_second_signal_kills_at_once(start: Start, tmp_path: Path) -> None:
    launcher = start("ignore_everything", grace_s=1000)
    wait_until_ready(launcher, tmp_path)
    launcher.process.send_signal(signal.SIGTERM)
    launcher.wait_for(lambda: "a second signal stops at once" in launcher.output())
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.end() == 128 + signal.SIGINT
    assert "Stopped at once by a second signal (SIGINT)" in launcher.output()
    assert record(tmp_path)["status"] == "stopped"


def test_a_hang_up_saves_the_run(start: Start, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    launcher = start("stop_when_one_is_asked", stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    wait_until_ready(launcher, tmp_path)
    os.close(ours)  # from here on whoever prints gets an error
    for _ in range(2):  # as the kernel and the shell both do
        launcher.process.send_signal(signal.SIGHUP)
    assert launcher.end() == 75
    assert record(tmp_path)["status"] == "stopped"
    assert (tmp_path / "run/global_step_7").is_dir()


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(start: Start, tmp_path: Path) -> None:
    launcher = start("stop_when_one_is_asked", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_until_ready(launcher, tmp_path)
    launcher.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 75
    assert "Stopped by SIGTERM" in launcher.output()


@pytest.mark.parametrize("seconds", [0, 1.5, 2.5, 3, 3.5])
def test_a_signal_is_never_lost_while_the_ranks_are_being_started(seconds: float, start: Start, tmp_path: Path) -> None:
    launcher = start("ignore_everything", restarts=3, grace_s=1)
    launcher.wait_for(lambda: record(tmp_path)["status"] == "waiting")
    time.sleep(seconds)  # torch is being imported, or the ranks are being born, or they have just begun
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 75
    assert record(tmp_path)["status"] == "stopped"
    assert len(record(tmp_path)["attempts"]) == 1


def test_a_crash_during_a_stop_is_a_crash(start: Start, tmp_path: Path) -> None:
    launcher = start("crash_when_asked", restarts=3)
    wait_until_ready(launcher, tmp_path)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 1
    assert re.search(r"^error: rank 1 \(process \d+\) failed with exit code 1; the same", launcher.output("err"))
    assert record(tmp_path)["status"] == "failed"


def test_ranks_that_finish_all_the_same_have_finished(start: Start, tmp_path: Path) -> None:
    launcher = start("finish_when_asked")
    wait_until_ready(launcher, tmp_path)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 0
    assert "Finished: small (sft)" in launcher.output()


def test_restarts_until_it_works(start: Start, tmp_path: Path) -> None:
    launcher = start("crash_twice", restarts=2, environment={"SMALL_RESUME_MODE": "disable"})
    assert launcher.end() == 0
    lines = [re.sub(r"process \d+", "process P", line) for line in launcher.output().splitlines()]
    assert lines[1:3] == [
        "rank 1 (process P) failed with exit code 1; restart 1 of 2 in 0.1 s from step 0",
        "rank 1 (process P) failed with exit code 1; restart 2 of 2 in 0.2 s from step 0",
    ]
    reasons = [attempt["exit_reason"] for attempt in record(tmp_path)["attempts"]]
    assert [reason.split(") ")[1] for reason in reasons] == ["failed with exit code 1"] * 2
    assert (tmp_path / "run/attempts_of_1").read_text().split() == ["disable"] * 3  # nothing was saved


def test_restarts_that_bring_nothing_are_given_up(start: Start, tmp_path: Path) -> None:
    launcher = start("crash_twice", restarts=1)
    assert launcher.end() == 1
    assert "restart 1 of 1" in launcher.output()
    assert launcher.output("err").count("error: rank 1 ") == 1
    assert record(tmp_path)["status"] == "failed"
    assert len(record(tmp_path)["attempts"]) == 2


def test_a_new_checkpoint_gives_all_restarts_anew(start: Start, tmp_path: Path) -> None:
    launcher = start("save_and_crash_twice", restarts=1, environment={"SMALL_RESUME_MODE": "disable"})
    assert launcher.end() == 0
    assert [line.split("; ")[1] for line in launcher.output().splitlines()[1:3]] == [
        "restart 1 of 1 in 0.1 s from global_step_10",
        "restart 1 of 1 in 0.1 s from global_step_20",
    ]
    assert (tmp_path / "run/attempts_of_1").read_text().split() == ["disable", "auto", "auto"]


def test_bad_input_is_not_restarted(start: Start, tmp_path: Path) -> None:
    launcher = start("refuse", restarts=3)
    assert launcher.end() == 2
    assert launcher.output("err") == "error: the data are no good\n"
    assert len(record(tmp_path)["attempts"]) == 1


def test_a_pause_before_a_restart_ends_with_a_signal(start: Start, tmp_path: Path) -> None:
    launcher = start("crash_twice", restarts=3, pause_s=300)
    launcher.wait_for(lambda: "restart 1 of 3 in 300 s" in launcher.output())
    launcher.process.send_signal(signal.SIGUSR1)
    assert launcher.end() == 75
    assert "Stopped by SIGUSR1; the same command begins at step 0." in launcher.output()
    assert record(tmp_path)["status"] == "stopped"


def free_port() -> int:
    with socket.socket() as file:
        file.bind(("127.0.0.1", 0))
        return file.getsockname()[1]


def test_one_of_two_nodes_is_asked_and_both_stop(start: Start, tmp_path: Path) -> None:
    port = str(free_port())
    nodes = [
        start("stop_when_one_is_asked", environment={"NNODES": "2", "NODE_RANK": node, "MASTER_PORT": port})
        for node in ("0", "1")
    ]
    wait_until_ready(nodes[0], tmp_path, 0, 1, 2, 3)
    nodes[1].note_children()
    nodes[1].process.send_signal(signal.SIGTERM)
    assert [node.end() for node in nodes] == [75, 75]
    assert nodes[0].output().splitlines()[1:] == [
        "Stopped by SIGUSR1 after step 7; the same command goes on from there."
    ]
    assert "Stopped by SIGTERM; the same command goes on from global_step_7." in nodes[1].output()
    assert record(tmp_path)["status"] == "stopped"


def test_a_node_that_waits_for_the_others_can_be_stopped(start: Start, tmp_path: Path) -> None:
    environment = {"NNODES": "2", "NODE_RANK": "0", "MASTER_PORT": str(free_port())}
    launcher = start("ignore_everything", environment=environment)
    launcher.wait_for(lambda: record(tmp_path)["status"] == "waiting")
    time.sleep(6)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 75
    assert record(tmp_path)["status"] == "stopped"


def test_a_signal_during_preparation_leaves_nothing_half_made(started: list[Launcher], tmp_path: Path) -> None:
    words = ["bash", "run_sft.sh", "2", f"trainer.default_local_dir={tmp_path}/run"]
    words += [f"prepare=['quickstart --samples 100000 --output {tmp_path}/data']"]
    launcher = Launcher(words, tmp_path, {"VERL_EXT_PYTHON": sys.executable})
    started.append(launcher)
    launcher.wait_for(lambda: "Preparing: quickstart" in launcher.output())
    launcher.process.send_signal(signal.SIGUSR1)
    assert launcher.end() == 75
    assert launcher.output("err") == ""
    assert "Stopped by SIGUSR1 before training; the same command begins anew." in launcher.output()
    assert not (tmp_path / "run").exists()
    from verl_ext.data.prepare import is_prepared

    assert not is_prepared(["quickstart", "--samples", "100000", "--output", f"{tmp_path}/data"])
