"""A run whose newest checkpoints or tracker are damaged says so, goes on from a whole one, and loses no step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.commands import Run, assert_goes_on

OWN = ("trainer.save_freq=1", "trainer.max_ckpt_to_keep=3")


@pytest.fixture(scope="module")
def four_steps(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory with checkpoints of steps 2, 3 and 4."""
    run = Run(quickstart, tmp_path_factory.mktemp("four_steps") / "run", *OWN, "trainer.total_training_steps=4")
    result = run.start()
    assert result.returncode == 0, result.stderr
    assert run.names() == {"2", "3", "4"}
    return run.run_dir


@pytest.fixture
def run(four_steps: Path, quickstart: Path, tmp_path: Path) -> Run:
    """The same run in a copy that a test may damage, to be gone on with."""
    shutil.copytree(four_steps, tmp_path / "run")
    return Run(quickstart, tmp_path / "run", *OWN)


def shard(run_dir: Path, step: int) -> Path:
    return run_dir / f"global_step_{step}/model_world_size_2_rank_1.pt"


def cut_short(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)


def flip_byte(path: Path) -> None:
    """Change one byte in the middle, among the numbers, where torch.load would not notice."""
    with path.open("rb+") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def damage_the_newest_two(run_dir: Path) -> None:
    flip_byte(shard(run_dir, 4))
    truncate(shard(run_dir, 3))


def copy_without_manifest(run_dir: Path) -> None:
    """The tracker names a directory into which everything but the manifest was copied."""
    shutil.copytree(run_dir / "global_step_4", run_dir / "global_step_5", ignore=shutil.ignore_patterns("manifest*"))
    (run_dir / "latest_checkpointed_iteration.txt").write_text("5")


@pytest.mark.parametrize(
    ("damage", "sentences", "goes_on_from"),
    [
        (
            lambda run_dir: truncate(shard(run_dir, 4)),
            ["global_step_4 cannot be resumed: its file model_world_size_2_rank_1.pt has 19"],
            3,
        ),
        (
            lambda run_dir: flip_byte(shard(run_dir, 4)),
            ["global_step_4 cannot be resumed: its file model_world_size_2_rank_1.pt has the digest"],
            3,
        ),
        (
            damage_the_newest_two,
            [
                "global_step_4 cannot be resumed: its file model_world_size_2_rank_1.pt has the digest",
                "global_step_3 cannot be resumed: its file model_world_size_2_rank_1.pt has 19",
            ],
            2,
        ),
        (
            lambda run_dir: (run_dir / "global_step_4/manifest.json").unlink(),
            ["global_step_4 cannot be resumed: it has no manifest.json"],
            3,
        ),
        (
            copy_without_manifest,
            ["global_step_5 cannot be resumed: it has no manifest.json"],
            4,
        ),
        (
            lambda run_dir: (run_dir / "latest_checkpointed_iteration.txt").write_text(""),
            ["the tracker file is empty"],
            4,
        ),
        (
            lambda run_dir: (run_dir / "latest_checkpointed_iteration.txt").write_text("40"),
            ["the tracker file names global_step_40, which does not exist"],
            4,
        ),
    ],
    ids=["cut_short", "flipped", "newest_two", "no_manifest", "copied_without_manifest", "empty_tracker", "tracker_40"],
)
def test_damage_is_named_and_the_run_goes_on(
    damage: Callable[[Path], object], sentences: list[str], goes_on_from: int, run: Run, quickstart: Path
) -> None:
    damage(run.run_dir)
    said = assert_goes_on(run, quickstart, goes_on_from).stderr
    for sentence in sentences:
        assert said.count(f"warning: {sentence}") == 1, said
    assert said.count("warning: ") == len(sentences), said


def test_a_run_without_a_whole_checkpoint_does_not_begin_anew(run: Run) -> None:
    for step in (2, 3, 4):
        flip_byte(shard(run.run_dir, step))
    result = run.start()
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("error: ") == 1
    assert "holds checkpoints but none is complete" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert run.names() == {"2", "3", "4"}
