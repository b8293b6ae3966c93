"""A run whose newest checkpoints or tracker are damaged warns, resumes from a complete one, and loses no step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.checkpoints import copy_checkpoints, flip_byte, truncate
from tests.helpers.commands import NUM_STEPS, SFTRun, assert_resumes
from verl_ext.checkpoint.manifest import TRACKER

STEPS = (2, 3, 4)


@pytest.fixture
def run(sft_run: SFTRun, quickstart: Path, tmp_path: Path) -> SFTRun:
    """A run that ended after step 4, with three checkpoints; a test may damage it."""
    copy_checkpoints(sft_run.run_dir, tmp_path / "run", *STEPS)
    return SFTRun(quickstart, tmp_path / "run", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=3")


def shard(run_dir: Path, step: int, kind: str = "model", rank: int = 1) -> Path:
    return run_dir / f"global_step_{step}/{kind}_world_size_2_rank_{rank}.pt"


def damage_newest_two(run_dir: Path) -> None:
    flip_byte(shard(run_dir, 4, "optim", rank=0))  # the ranks share the files among themselves, the largest first
    truncate(shard(run_dir, 3))


def copy_without_manifest(run_dir: Path) -> None:
    """Copy a checkpoint without its manifest, and make the tracker name the copy."""
    shutil.copytree(run_dir / "global_step_4", run_dir / "global_step_5", ignore=shutil.ignore_patterns("manifest*"))
    (run_dir / TRACKER).write_text("5")


@pytest.mark.parametrize(
    ("damage", "warnings", "resumes_from"),
    [
        (
            damage_newest_two,
            [
                ("global_step_4", "optim_world_size_2_rank_0.pt has the digest"),
                ("global_step_3", "model_world_size_2_rank_1.pt has 19"),
            ],
            2,
        ),
        (copy_without_manifest, [("global_step_5", "manifest.json")], 4),
        (lambda run_dir: (run_dir / TRACKER).write_text("40"), [("tracker", "global_step_40")], 4),
    ],
    ids=["newest_two", "copied_without_manifest", "tracker_40"],
)
def test_damage_is_reported_and_run_resumes(
    damage: Callable[[Path], object],
    warnings: list[tuple[str, str]],
    resumes_from: int,
    run: SFTRun,
    sft_run: SFTRun,
) -> None:
    damage(run.run_dir)
    printed = assert_resumes(run, sft_run, resumes_from).stderr
    lines = [line for line in printed.splitlines() if line.startswith("warning: ")]
    assert len(lines) == printed.count("warning: ") == len(warnings), printed
    for line, fragments in zip(lines, warnings, strict=True):
        assert all(fragment in line for fragment in fragments), printed


def test_tracker_is_repaired_after_kill_before_its_write(sft_run: SFTRun, quickstart: Path, tmp_path: Path) -> None:
    """The last checkpoint is complete, so nothing is left to train, and the next start updates the tracker."""
    run = SFTRun(quickstart, tmp_path / "run", "trainer.save_freq=1")
    copy_checkpoints(sft_run.run_dir, run.run_dir, NUM_STEPS - 1, NUM_STEPS)
    (run.run_dir / TRACKER).write_text(str(NUM_STEPS - 1))
    os.utime(run.run_dir / TRACKER, (0, 0))
    assert f"Found checkpoint: {run.last_checkpoint}\n" in run.finish().stdout
    assert run.tracker() == str(NUM_STEPS)


def test_run_without_complete_checkpoint_does_not_start_over(run: SFTRun) -> None:
    for step, kind in zip(STEPS, ("model", "optim", "extra_state"), strict=True):
        flip_byte(shard(run.run_dir, step, kind))
    result = run.start()
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("error: ") == 1
    assert "none is complete" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert run.names() == {str(step) for step in STEPS}
