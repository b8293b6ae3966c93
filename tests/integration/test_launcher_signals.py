"""The launcher under signals and crashes, with small programs in place of the trainer under real torchrun."""

from __future__ import annotations

import os
import pty
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.commands import script_run
from tests.helpers.launchers import Launcher, SmallLaunches, check_signal_is_not_lost, small_launches
from tests.helpers.monitor import look
from tests.helpers.processes import free_port, wait_until
from verl_ext.health import run_directory
from verl_ext.metrics import heartbeat
from verl_ext.monitor.follower import RunFollower


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[SmallLaunches]:
    with small_launches(tmp_path) as launches:
        yield launches


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGINT])
def test_signal_to_launcher_reaches_every_rank(number: signal.Signals, launches: SmallLaunches) -> None:
    launcher = launches.start("stop_when_one_is_asked")
    launches.wait_until_ready(launcher)
    launcher.process.send_signal(number)
    assert launcher.end() == 75
    _, asked, stopped = launcher.output().splitlines()
    assert asked.startswith(f"{number.name}: ") and "60 s" in asked
    assert stopped.startswith(f"Stopped by {number.name} after step 7")
    assert launcher.output("err") == ""
    assert launches.record()["status"] == "stopped"


def test_signal_to_one_rank_stops_all(launches: SmallLaunches) -> None:
    launcher = launches.start("stop_when_one_is_asked", restarts=3)
    launches.wait_until_ready(launcher)
    os.kill(int((launches.run_dir / "ready_1").read_text()), signal.SIGUSR1)
    assert launcher.end() == 75
    starting, stopped = launcher.output().splitlines()
    assert "small (sft) on 2 ranks" in starting
    assert stopped.startswith("Stopped by SIGUSR1 after step 7")
    assert launches.record()["status"] == "stopped"


def test_ranks_that_take_too_long_are_killed(launches: SmallLaunches) -> None:
    launcher = launches.start("ignore_everything", grace_s=1.5)
    launches.wait_until_ready(launcher)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 75
    error = launcher.output("err")
    assert error.startswith("error: ") and error.count("\n") == 1
    assert all(fragment in error for fragment in ("trainer.preemption.grace_s=1.5", "SIGTERM", "step 0"))
    assert launches.record()["status"] == "stopped"
    assert "trainer.preemption.grace_s=1.5" in launches.record()["attempts"][-1]["exit_reason"]


def test_repeated_signals_are_one_request(launches: SmallLaunches) -> None:
    launcher = launches.start("stop_when_one_is_asked", environment={"SMALL_SAVE_S": "4.5"})
    launches.wait_until_ready(launcher)
    launcher.note_children()
    launcher.process.send_signal(signal.SIGTERM)
    launcher.wait_for(lambda: "SIGTERM: " in launcher.output())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGHUP):
        launcher.wait_while_running(0.6)
        for process in (launcher.process, *launcher.seen):  # as a scheduler does
            process.send_signal(number)
    assert launcher.end() == 75
    assert "Stopped by SIGTERM after step 7" in launcher.output()
    assert launches.record()["status"] == "stopped"
    assert (launches.run_dir / "global_step_7").is_dir()


def test_second_interrupt_kills_immediately(launches: SmallLaunches) -> None:
    launcher = launches.start("ignore_everything", grace_s=1000)
    launches.wait_until_ready(launcher)
    launcher.process.send_signal(signal.SIGINT)
    launcher.wait_for(lambda: "Ctrl-C again" in launcher.output())
    launcher.process.send_signal(signal.SIGINT)  # as a wrapper forwards what the terminal sends as well
    launcher.wait_while_running(1.2)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.end() == 128 + signal.SIGINT
    assert "immediately by a second SIGINT" in launcher.output()
    assert launches.record()["status"] == "stopped"


def test_killed_launcher_is_seen_from_another_host(
    launches: SmallLaunches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks log nothing: the run is alive as long as the launcher is, and killed soon after."""
    monkeypatch.setattr(heartbeat, "DEAD_AFTER_S", 1.0)
    monkeypatch.setattr(run_directory, "MAX_SILENCE_S", 0.0)  # silence alone does not count
    monkeypatch.setattr(run_directory, "pid_namespace", lambda: 1)
    follower = RunFollower(tmp_path / "monitor.sqlite", launches.run_dir.parent)

    def status() -> str:
        look(follower)
        return follower.runs["run"].status

    launcher = launches.start("stop_when_one_is_asked")
    launches.wait_until_ready(launcher)
    for _ in range(12):
        assert status() == "running"
        launcher.wait_while_running(0.15)
    launcher.process.kill()
    wait_until(lambda: status() == "killed", pause_s=0.1)
    assert "no heartbeat" in str(follower.runs["run"].exit_reason)
    assert launches.record()["attempts"][-1]["heartbeat_s"] == heartbeat.BEAT_S
    follower.stop()


@pytest.mark.parametrize("everywhere", [False, True])
def test_sigquit_kills_immediately(everywhere: bool, launches: SmallLaunches) -> None:
    launcher = launches.start("ignore_everything", grace_s=1000, restarts=3)
    launches.wait_until_ready(launcher)
    launcher.note_children()
    for process in launcher.seen if everywhere else ():
        process.send_signal(signal.SIGQUIT)
    launcher.process.send_signal(signal.SIGQUIT)
    assert launcher.end() == 128 + signal.SIGQUIT
    assert "immediately by SIGQUIT" in launcher.output()
    assert launches.record()["status"] == "stopped"


def test_sighup_saves_run(launches: SmallLaunches) -> None:
    ours, theirs = pty.openpty()
    launcher = launches.start("stop_when_one_is_asked", stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    launches.wait_until_ready(launcher)
    os.close(ours)  # printing fails from now on
    for _ in range(2):  # as the kernel and the shell both do
        launcher.process.send_signal(signal.SIGHUP)
    assert launcher.end() == 75
    assert launches.record()["status"] == "stopped"
    assert (launches.run_dir / "global_step_7").is_dir()


def test_signal_ignored_at_start_stays_ignored(launches: SmallLaunches) -> None:
    launcher = launches.start("stop_when_one_is_asked", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    launches.wait_until_ready(launcher)
    launcher.process.send_signal(signal.SIGHUP)
    assert launcher.ignores(signal.SIGHUP)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 75
    assert "Stopped by SIGTERM" in launcher.output()  # pending signals are handled in the order of their numbers


@pytest.mark.parametrize("phase", ["waiting", "first rank started"])
def test_signal_during_rank_startup_is_not_lost(phase: str, launches: SmallLaunches) -> None:
    check_signal_is_not_lost(launches, phase)


def test_crash_during_stop_is_reported_as_crash(launches: SmallLaunches) -> None:
    launcher = launches.start("crash_when_asked", restarts=3)
    launches.wait_until_ready(launcher)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 1
    assert re.search(r"^error: rank 1 \(process \d+\) failed with exit code 1", launcher.output("err"))
    assert launches.record()["status"] == "failed"


def test_ranks_finishing_despite_stop_count_as_finished(launches: SmallLaunches) -> None:
    launcher = launches.start("finish_when_asked")
    launches.wait_until_ready(launcher)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 0
    assert "Finished: small (sft)" in launcher.output()


def test_restarts_until_run_succeeds(launches: SmallLaunches) -> None:
    launcher = launches.start("crash_twice", restarts=2, environment={"SMALL_RESUME_MODE": "disable"})
    assert launcher.end() == 0
    restarts = launcher.output().splitlines()[1:3]
    assert all(line.startswith("rank 1 ") and "exit code 1" in line for line in restarts)
    assert [line.split("; ")[1] for line in restarts] == [
        "restart 1 of 2 in 0.1 s from step 0",
        "restart 2 of 2 in 0.2 s from step 0",
    ]
    reasons = [attempt["exit_reason"] for attempt in launches.record()["attempts"]]
    assert [reason.split(") ")[1] for reason in reasons] == ["failed with exit code 1"] * 2
    assert (launches.run_dir / "attempts_of_1").read_text().split() == ["disable"] * 3  # nothing was saved


def test_restarts_without_progress_are_limited(launches: SmallLaunches) -> None:
    launcher = launches.start("crash_twice", restarts=1)
    assert launcher.end() == 1
    assert "restart 1 of 1" in launcher.output()
    assert launcher.output("err").count("error: rank 1 ") == 1
    assert launches.record()["status"] == "failed"
    assert len(launches.record()["attempts"]) == 2


def test_new_checkpoint_resets_restart_count(launches: SmallLaunches) -> None:
    launcher = launches.start("save_and_crash_twice", restarts=1, environment={"SMALL_RESUME_MODE": "disable"})
    assert launcher.end() == 0
    assert [line.split("; ")[1] for line in launcher.output().splitlines()[1:3]] == [
        "restart 1 of 1 in 0.1 s from global_step_10",
        "restart 1 of 1 in 0.1 s from global_step_20",
    ]
    assert (launches.run_dir / "attempts_of_1").read_text().split() == ["disable", "auto", "auto"]


def test_bad_input_is_not_restarted(launches: SmallLaunches) -> None:
    launcher = launches.start("refuse", restarts=3)
    assert launcher.end() == 2
    assert "the data are no good" in launcher.output("err")
    assert len(launches.record()["attempts"]) == 1


def test_signal_ends_pause_before_restart(launches: SmallLaunches) -> None:
    launcher = launches.start("crash_twice", restarts=3, pause_s=300)
    launcher.wait_for(lambda: "restart 1 of 3 in 300 s" in launcher.output())
    launcher.process.send_signal(signal.SIGUSR1)
    assert launcher.end() == 75
    assert "Stopped by SIGUSR1" in launcher.output() and "step 0" in launcher.output().splitlines()[-1]
    assert launches.record()["status"] == "stopped"


def start_nodes(launches: SmallLaunches, behavior: str, restarts: int = 0, pause_s: float = 0.1) -> list[Launcher]:
    port = str(free_port())
    places = [{"NNODES": "2", "NODE_RANK": node, "MASTER_PORT": port} for node in ("0", "1")]
    return [launches.start(behavior, restarts=restarts, pause_s=pause_s, environment=place) for place in places]


def test_signal_to_one_of_two_nodes_stops_both(launches: SmallLaunches) -> None:
    nodes = start_nodes(launches, "stop_when_one_is_asked")
    launches.wait_until_ready(nodes[0], 0, 1, 2, 3)
    nodes[1].note_children()
    nodes[1].process.send_signal(signal.SIGTERM)
    assert [node.end() for node in nodes] == [75, 75]
    [stopped] = nodes[0].output().splitlines()[1:]
    assert stopped.startswith("Stopped by SIGUSR1 after step 7")
    assert "Stopped by SIGTERM" in nodes[1].output() and "global_step_7" in nodes[1].output()
    assert launches.record()["status"] == "stopped"


def test_signal_before_ranks_of_one_node_can_save_stops_both(launches: SmallLaunches) -> None:
    nodes = start_nodes(launches, "fail_first_on_second_node", restarts=1)
    launches.wait_until_ready(nodes[0], 0, 1, 2, 3)
    nodes[1].process.send_signal(signal.SIGTERM)  # its ranks handle no signal, as while they start
    assert [node.end() for node in nodes] == [75, 75]
    assert "Node 1 was stopped; the same command starts at step 0" in nodes[0].output()
    assert launches.record()["attempts"][-1]["exit_reason"] == "node 1 was stopped"


def test_signal_in_pause_of_one_node_stops_both(launches: SmallLaunches) -> None:
    nodes = start_nodes(launches, "fail_first_on_second_node", restarts=1, pause_s=5)
    launches.wait_until_ready(nodes[0], 0, 1, 2, 3)
    (launches.run_dir / "fail").write_text("crash")
    nodes[1].wait_for(lambda: "restart 1 of 1 in 5 s" in nodes[1].output())
    nodes[1].process.send_signal(signal.SIGTERM)
    assert [node.end() for node in nodes] == [75, 75]
    assert launches.record()["status"] == "stopped"


def test_crash_on_one_node_restarts_all_nodes(launches: SmallLaunches) -> None:
    nodes = start_nodes(launches, "fail_first_on_second_node", restarts=1)
    launches.wait_until_ready(nodes[0], 0, 1, 2, 3)
    (launches.run_dir / "fail").write_text("crash")
    assert [node.end() for node in nodes] == [0, 0]
    crash, restart = r"rank 3 \(process \d+\) failed with exit code 1", "; restart 1 of 1 in 0.1 s from step 0"
    assert re.search(f"^node 1: {crash}{restart}$", nodes[0].output(), re.M)
    assert re.search(f"^{crash}{restart}$", nodes[1].output(), re.M)
    assert [node.output("err") for node in nodes] == ["", ""]
    assert [len((launches.run_dir / f"attempts_of_{rank}").read_text().split()) for rank in range(4)] == [2] * 4


def test_input_refused_on_one_node_ends_all_nodes(launches: SmallLaunches) -> None:
    nodes = start_nodes(launches, "fail_first_on_second_node", restarts=3)
    launches.wait_until_ready(nodes[0], 0, 1, 2, 3)
    (launches.run_dir / "fail").write_text("refuse")
    assert [node.end() for node in nodes] == [2, 2]
    assert "node 1: the data are no good" in nodes[0].output("err")


def test_node_that_is_started_again_restarts_the_others(launches: SmallLaunches) -> None:
    nodes = start_nodes(launches, "fail_first_on_second_node", restarts=1)
    launches.wait_until_ready(nodes[0], 0, 1, 2, 3)
    nodes[1].process.kill()
    nodes[1].process.wait()
    again = launches.start("fail_first_on_second_node", environment=nodes[1].environment)
    assert (nodes[0].end(), again.end()) == (0, 0)
    assert "node 1: it was started again; restart 1 of 1 in 0.1 s from step 0" in nodes[0].output()


def test_node_waiting_for_others_can_be_stopped(launches: SmallLaunches) -> None:
    port = free_port()
    environment = {"NNODES": "2", "NODE_RANK": "0", "MASTER_PORT": str(port)}
    launcher = launches.start("ignore_everything", environment=environment, leave_after_s=0.5)
    launcher.wait_for(lambda: launcher.listens_on(port))
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 75
    assert launches.record()["status"] == "stopped"


def test_signal_during_preparation_leaves_no_partial_output(launches: SmallLaunches, tmp_path: Path) -> None:
    prepare = f"prepare=['quickstart --samples 100000 --output {tmp_path}/data']"
    files = (f"data.train_files={tmp_path}/data/train.parquet", f"data.val_files={tmp_path}/data/val.parquet")
    words = (f"trainer.default_local_dir={tmp_path}/run", f"model.partial_pretrain={tmp_path}/data/model", *files)
    run = script_run("run_sft.sh", 2, tmp_path / "run", prepare, *words)
    launcher = launches.add(Launcher(run.words, tmp_path, {"VERL_EXT_PYTHON": sys.executable}))
    launcher.wait_for(lambda: "Preparing: quickstart" in launcher.output())
    launcher.process.send_signal(signal.SIGUSR1)
    assert launcher.end() == 75
    assert launcher.output("err") == ""
    assert "Stopped by SIGUSR1 before training" in launcher.output()
    assert not (tmp_path / "run").exists()
    from verl_ext.data.prepare import is_prepared

    assert not is_prepared(["quickstart", "--samples", "100000", "--output", f"{tmp_path}/data"])
