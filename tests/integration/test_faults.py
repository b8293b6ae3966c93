"""SIGKILL of one rank and of all at each point of the checkpoint protocol; the same command then loses nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.helpers.commands import Hold, Run, assert_goes_on

ANY: tuple[int, ...] = ()
"""One rank, drawn anew in every run of the test."""
MANAGER, SAVE, COMMIT = (f"verl_ext.checkpoint.{name}" for name in ("manager", "save", "commit"))
SHARDS = {f"{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim", "extra_state") for rank in (0, 1)}


@dataclass(frozen=True)
class Point:
    """A point of the protocol in the save of step 4, when step 2 is saved.

    Attributes:
        hold: the call that is the point.
        names: the directories there, `global_step_` left out.
        tracker: what the tracker says there.
        overrides: of the recipe.
    """

    hold: Hold
    names: set[str]
    tracker: str = "2"
    overrides: tuple[str, ...] = ()


POINTS = {
    "before staging": Point(Hold(MANAGER, "CheckpointManager._make_room", "global_step_4"), {"2"}),
    "staging": Point(Hold("verl_ext.checkpoint.staging", "Stager.stage", call=2), {"2", "4.tmp"}),
    "shard writes": Point(
        Hold("verl_ext.checkpoint.writing", "DigestingFile.write", "4.tmp/optim", when="after", call=20), {"2", "4.tmp"}
    ),
    "export": Point(
        Hold("verl_ext.checkpoint.export", "ExportWriter.write_rows", "global_step_4.tmp", call=5), {"2", "4.tmp"}
    ),
    "before the manifest": Point(Hold(SAVE, "write_manifest", "global_step_4.tmp"), {"2", "4.tmp"}),
    "before the rename": Point(Hold(SAVE, "publish", "global_step_4.tmp"), {"2", "4.tmp"}),
    "before the tracker": Point(Hold(COMMIT, "point_tracker", call=2), {"2", "4"}),
    "rotation": Point(
        Hold(COMMIT, "shutil.rmtree", "global_step_2.removing"),
        {"2.removing", "4"},
        tracker="4",
        overrides=("trainer.max_ckpt_to_keep=1",),
    ),
}


def assert_is_at(name: str, run: Run, rank: int) -> None:
    """See on the disk that a run is held at the point of that name, by this rank."""
    point = POINTS[name]
    assert run.names() == point.names
    assert run.tracker() == point.tracker
    unfinished = run.run_dir / "global_step_4.tmp"
    sizes = {path.name: path.stat().st_size for path in unfinished.glob("*.pt")}
    before = {path.name: path.stat().st_size for path in run.run_dir.glob("global_step_2/*.pt")}
    own = f"optim_world_size_2_rank_{rank}.pt"
    if name == "staging":
        assert f"model_world_size_2_rank_{rank}.pt" not in sizes  # the other rank may have begun to write
    if name == "shard writes":
        assert 0 < sizes[own] < before[own]
    if name == "export":
        assert sizes[own] == before[own]
        assert (unfinished / "huggingface/model.safetensors").exists()
    if name.startswith("before the"):
        assert (unfinished / "manifest.json").exists() == (name == "before the rename")
    if name in ("before the manifest", "before the rename"):
        assert {shard: sizes[shard] for shard in SHARDS} == {shard: before[shard] for shard in SHARDS}


def kill_at(name: str, victims: tuple[int, ...], run: Run, directory: Path, *overrides: str) -> str:
    """Hold a run at a point, kill ranks there, and return what the command said when it had ended."""
    point, victims = POINTS[name], victims or (random.randrange(2),)
    print(f"killed {name}: ranks {victims}")
    # What only rank 0 does is held there, and a dead sibling finds it in the middle of it.
    is_for_rank_zero = point.hold.module in (SAVE, COMMIT)
    rank = 0 if is_for_rank_zero else victims[0]
    with run.held(replace(point.hold, rank=rank), directory, *overrides) as held:
        ranks = held.ranks()
        assert_is_at(name, run, rank)
        for victim in victims:
            ranks[victim].kill()
        result = held.release()
    assert result.returncode == 1, result.stderr
    deaths = [f"rank {victim} (process {ranks[victim].pid}) was killed by SIGKILL" for victim in victims]
    assert any(death in result.stderr for death in deaths), result.stderr
    # A rank 0 that outlives its sibling finishes what it alone does.
    assert run.names() == (point.names if rank in victims else {"2", "4"})
    return result.stderr


@pytest.mark.parametrize(
    ("name", "victims", "goes_on_from"),
    [
        ("before staging", ANY, 2),
        ("before staging", (0, 1), 2),
        ("shard writes", ANY, 2),
        ("shard writes", (0, 1), 2),
        ("export", ANY, 2),
        ("export", (0, 1), 2),
        ("before the manifest", (0,), 2),
        ("before the manifest", (1,), 4),  # rank 0 has all it needs to finish the commit
        ("before the manifest", (0, 1), 2),
        ("before the rename", (0, 1), 2),
        ("before the tracker", (0,), 4),
        ("before the tracker", (0, 1), 4),
        ("rotation", (0,), 4),
        ("rotation", (0, 1), 4),
    ],
    ids=str,
)
def test_a_kill_loses_nothing(
    name: str, victims: tuple[int, ...], goes_on_from: int, quickstart: Path, tmp_path: Path
) -> None:
    run = Run(quickstart, tmp_path / "run", *POINTS[name].overrides)
    said = kill_at(name, victims, run, tmp_path)
    assert f"the same command goes on from global_step_{goes_on_from}" in said
    assert_goes_on(run, quickstart, goes_on_from)


@pytest.mark.parametrize(
    ("name", "victims", "goes_on_from"),
    [
        ("staging", ANY, 2),
        ("shard writes", (0, 1), 2),
        ("export", ANY, 2),
        ("before the tracker", (0, 1), 4),
    ],
    ids=str,
)
def test_a_kill_during_a_save_in_the_background_loses_nothing(
    name: str, victims: tuple[int, ...], goes_on_from: int, quickstart: Path, tmp_path: Path
) -> None:
    run = Run(quickstart, tmp_path / "run", "trainer.checkpoint.async_save=true")
    said = kill_at(name, victims, run, tmp_path)
    assert f"the same command goes on from global_step_{goes_on_from}" in said
    assert_goes_on(run, quickstart, goes_on_from)
