"""A run saved on one number of ranks resumes on any other, and its checkpoints can be read without ranks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import commands
from tests.helpers.checkpoints import copy_checkpoints, flip_byte
from tests.helpers.commands import NUM_STEPS, SFTRun
from verl_ext.checkpoint.manifest import Manifest

SAVED_AT = 2


def finished(num_ranks: int, quickstart: Path, run_dir: Path, *overrides: str) -> SFTRun:
    """Train to the end on this many ranks, without dropout, because its random numbers depend on the rank."""
    keep_all = "trainer.max_ckpt_to_keep=null"
    run = SFTRun(quickstart, run_dir, keep_all, *overrides, num_ranks=num_ranks, dropout=False)
    run.finish()
    return run


@pytest.fixture(scope="module")
def uninterrupted(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, SFTRun]:
    """Runs on one rank, and on two that save in the background."""
    in_background = "trainer.checkpoint.async_save=true"
    return {
        1: finished(1, quickstart, tmp_path_factory.mktemp("one")),
        2: finished(2, quickstart, tmp_path_factory.mktemp("two"), in_background),
    }


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_resume_on_other_number_of_ranks_keeps_losses(
    before: int, after: int, uninterrupted: dict[int, SFTRun], quickstart: Path, tmp_path: Path
) -> None:
    copy_checkpoints(uninterrupted[before].run_dir, tmp_path / "run", SAVED_AT)
    run = finished(after, quickstart, tmp_path / "run")
    losses, expected = run.losses(1), uninterrupted[before].losses(1)
    assert sorted(losses) == list(range(SAVED_AT + 1, NUM_STEPS + 1))
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step], rel=1e-5)
    assert Manifest.read(run.last_checkpoint).world_size == after


def test_resume_on_two_ranks_and_back_keeps_losses(
    uninterrupted: dict[int, SFTRun], quickstart: Path, tmp_path: Path
) -> None:
    """From one rank to two and back: rounding errors of both changes accumulate."""
    copy_checkpoints(uninterrupted[1].run_dir, tmp_path / "on two", SAVED_AT)
    on_two = finished(2, quickstart, tmp_path / "on two")
    copy_checkpoints(on_two.run_dir, tmp_path / "on one", SAVED_AT + 2)
    losses, expected = finished(1, quickstart, tmp_path / "on one").losses(1), uninterrupted[1].losses(1)
    assert losses == pytest.approx({step: expected[step] for step in range(SAVED_AT + 3, NUM_STEPS + 1)}, rel=1e-5)


def test_background_saves_are_recorded_and_complete(uninterrupted: dict[int, SFTRun]) -> None:
    rows = uninterrupted[2].rows()
    saved = {row["step"] for row in rows if "time/train/save_s" in row}
    written = {row["step"]: row for row in rows if "time/checkpoint/write_s" in row}
    assert saved == written.keys() == {2, 4, 6}
    assert all(row["system/disk_free_gib"] > 0 for row in written.values())


def checkpoint(*words: str | int | Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m verl_ext.checkpoint`."""
    return commands.python("verl_ext.checkpoint", *map(str, words))


def test_diff_compares_checkpoints_tensor_by_tensor(uninterrupted: dict[int, SFTRun]) -> None:
    import torch

    one, two = uninterrupted[1], uninterrupted[2]
    same = checkpoint("diff", two.run_dir, NUM_STEPS, two.last_checkpoint, "--optimizer")
    assert (same.returncode, same.stderr) == (0, "")
    count = len(torch.load(one.last_checkpoint / "model_world_size_1_rank_0.pt", weights_only=False))
    assert f"{4 * count} of {4 * count} tensors" in same.stdout
    other = checkpoint("diff", one.run_dir, SAVED_AT, two.last_checkpoint)
    assert other.returncode == 1
    assert f"0 of {count} tensors" in other.stdout


def test_export_from_shards_equals_export_of_training(uninterrupted: dict[int, SFTRun], tmp_path: Path) -> None:
    run = uninterrupted[2]
    result = checkpoint("export", run.run_dir, "--step", SAVED_AT, "--output", tmp_path / "model")
    assert (result.returncode, result.stderr) == (0, "")
    written = run.run_dir / f"global_step_{SAVED_AT}/huggingface"
    assert {path.name for path in (tmp_path / "model").iterdir()} == {path.name for path in written.iterdir()}
    assert (tmp_path / "model/model.safetensors").read_bytes() == (written / "model.safetensors").read_bytes()


def test_damaged_export_is_rebuilt_in_place(uninterrupted: dict[int, SFTRun], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    damaged = tmp_path / "run/global_step_6"
    shutil.copytree(uninterrupted[2].last_checkpoint, damaged)
    export = damaged / "huggingface/model.safetensors"
    before = {name: tensor.clone() for name, tensor in load_file(export).items()}  # which maps the file
    export.write_bytes(b"cut")
    assert checkpoint("verify", tmp_path / "run").returncode == 1
    rebuilt = checkpoint("export", damaged, "--dtype", "fp32", "--max-shard-gib", "0.002")
    assert (rebuilt.returncode, rebuilt.stderr) == (0, "")
    assert checkpoint("verify", tmp_path / "run").returncode == 0
    model = AutoModelForCausalLM.from_pretrained(damaged / "huggingface", dtype="auto")
    assert model.dtype == torch.float32
    assert all(torch.equal(tensor.to(torch.bfloat16), before[name]) for name, tensor in model.state_dict().items())


def test_rejects_export_from_damaged_shards(uninterrupted: dict[int, SFTRun], tmp_path: Path) -> None:
    copy_checkpoints(uninterrupted[2].run_dir, tmp_path / "run", NUM_STEPS)
    shard = tmp_path / f"run/global_step_{NUM_STEPS}/model_world_size_2_rank_1.pt"
    flip_byte(shard)
    (
        shard.parent / "huggingface/model.safetensors"
    ).unlink()  # the export, which can be rebuilt, must not hide the shard
    result = checkpoint("export", tmp_path / "run", "--step", NUM_STEPS, "--output", tmp_path / "model")
    assert result.returncode == 2
    assert shard.name in result.stderr
    assert not (tmp_path / "model").exists()
