"""Two launches on one run directory, and a launcher that dies by SIGKILL."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil

from tests.helpers.commands import Hold, Run, assert_goes_on, assert_is_undisturbed

IN_THE_SECOND_SAVE = Hold("verl_ext.checkpoint.save", "write_manifest", "global_step_4.tmp")


def test_a_second_launch_refuses_and_disturbs_nothing(quickstart: Path, tmp_path: Path) -> None:
    run = Run(quickstart, tmp_path / "run")
    with run.held(IN_THE_SECOND_SAVE, tmp_path) as held:
        second = run.start()
        assert second.returncode == 2, second.stderr
        assert second.stderr.count("error: ") == 1
        assert f"in use by process {held.process.pid} on {socket.gethostname()}" in second.stderr
        assert second.stdout == ""
        assert run.names() == {"2", "4.tmp"}
        first = held.release()
    assert first.returncode == 0, first.stderr
    assert_is_undisturbed(run, quickstart, begun_at=0)


def test_the_lock_of_a_killed_launcher_is_taken_over(quickstart: Path, tmp_path: Path) -> None:
    run = Run(quickstart, tmp_path / "run")
    with run.held(IN_THE_SECOND_SAVE, tmp_path) as held:
        ranks = list(held.ranks().values())
        held.process.kill()
        held.process.wait()
        _, alive = psutil.wait_procs(ranks, timeout=60)
        assert len(ranks) == 2
        assert not alive
        assert f"process {held.process.pid} on" in (run.run_dir / "run.lock").read_text()
    said = assert_goes_on(run, quickstart, 2).stderr
    assert "in use" not in said
    assert (run.run_dir / "run.lock").read_text() == ""
    assert "without a word" in run.attempts()[0]["exit_reason"]
