"""Launches that are rejected, two launches on one run directory, and a launcher killed by SIGKILL."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from tests.helpers import tree_of
from tests.helpers.commands import Hold, SFTRun, assert_resumes, assert_undisturbed
from tests.helpers.processes import wait_gone
from verl_ext.metrics.run_record import LOST

IN_THE_SECOND_SAVE = Hold("verl_ext.checkpoint.save", "write_manifest", "global_step_4.tmp")


def test_rejected_launch_leaves_finished_run_unchanged(sft_run: SFTRun, quickstart: Path, tmp_path: Path) -> None:
    run = SFTRun(quickstart, Path(shutil.copytree(sft_run.run_dir, tmp_path / "run")))
    before = tree_of(run.run_dir)
    mistakes = {
        "trainer.logger=[wanbd]": "'wandb'",
        "data.chat_template=no.jinja": "no.jinja",
        # it would train nothing, and config.yaml would claim it
        "optim.lr=0.5": "is finished, and this command changes",
        "data.train_batch_size=4": "is finished, and this command changes settings (data.train_batch_size: 8 -> 4",
        "trainer.total_training_steps=2": "is finished, and this command changes",
    }
    for mistake, fragment in mistakes.items():
        refused = run.start(mistake)
        assert refused.returncode == 2 and fragment in refused.stderr and refused.stderr.count("error: ") == 1
        assert tree_of(run.run_dir) == before
    # what only the ranks can see
    refused = run.start("data.max_length=20", "trainer.total_training_steps=8")
    assert refused.returncode == 2 and "train.parquet row 0" in refused.stderr
    after, was = ({name: what[0] for name, what in tree.items()} for tree in (tree_of(run.run_dir), before))
    console = str(run.run_dir / "console.log")  # records the refusal, too
    assert after.pop(console).startswith(was.pop(console))
    assert after == was


def test_second_launch_is_rejected_and_disturbs_nothing(sft_run: SFTRun, quickstart: Path, tmp_path: Path) -> None:
    run = SFTRun(quickstart, tmp_path / "run")
    with run.held(IN_THE_SECOND_SAVE, tmp_path) as held:
        second = run.start()
        assert second.returncode == 2, second.stderr
        assert second.stderr.count("error: ") == 1
        assert f"process {held.process.pid} on {socket.gethostname()}" in second.stderr
        assert second.stdout == ""
        assert run.names() == {"2", "4.tmp"}
        first = held.release()
    assert first.returncode == 0, first.stderr
    assert_undisturbed(run, sft_run, begun_at=0)


def test_lock_of_killed_launcher_is_taken_over(sft_run: SFTRun, quickstart: Path, tmp_path: Path) -> None:
    run = SFTRun(quickstart, tmp_path / "run")
    with run.held(IN_THE_SECOND_SAVE, tmp_path) as held:
        ranks = held.ranks()
        assert sorted(ranks) == [0, 1]
        held.process.kill()
        held.process.wait()
        wait_gone(ranks.values())
        assert f"process {held.process.pid} on" in (run.run_dir / "run.lock").read_text()
    printed = assert_resumes(run, sft_run, 2).stderr
    assert "in use" not in printed
    assert (run.run_dir / "run.lock").read_text() == ""
    reason = run.attempts()[0]["exit_reason"]
    assert reason == LOST
