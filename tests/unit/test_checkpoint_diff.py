"""`python -m verl_ext.checkpoint diff`: differences between two checkpoints, tensor by tensor."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints import checkpoint_command
from tests.helpers.trainer import make_trainer, small_config
from verl_ext.checkpoint.__main__ import SHOWN
from verl_ext.checkpoint.compare import compare
from verl_ext.checkpoint.manifest import OPTIMIZER, shard_name

SHARDS = "trainer.checkpoint.save_contents=[model,optimizer,extra]"


@pytest.fixture(scope="module")
def run_dir(one_rank: None, quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of one model, and step 2 saved again as step 3. Tests must not change it."""
    directory = tmp_path_factory.mktemp("run")
    trainer = make_trainer(small_config(quickstart, directory, SHARDS, "trainer.max_ckpt_to_keep=null"))
    batches = trainer.batches()
    for step in (1, 2):
        trainer.training_step(next(batches))
        trainer.save_checkpoint(step)
    trainer.save_checkpoint(3)
    trainer.checkpoint_manager.wait()
    return directory


@pytest.fixture
def copy(run_dir: Path, tmp_path: Path) -> Path:
    """A copy of the run, which a test may damage."""
    return shutil.copytree(run_dir, tmp_path / "run")


def change(checkpoint: Path, name: str, value: torch.Tensor | None) -> None:
    """Replace or remove a tensor in a checkpoint's only model shard."""
    path = checkpoint / shard_name("model", 1, 0)
    content = torch.load(path, weights_only=False)
    del content[name]
    torch.save(content if value is None else {**content, name: value}, path)


def test_identical_checkpoints_are_bitwise_equal(run_dir: Path) -> None:
    last = checkpoint_command("diff", run_dir, 2, 3).splitlines()
    assert len(last) == 1 and last[0].endswith("tensors are equal bit for bit")
    equal, _, num_tensors, *_ = last[0].split()
    assert equal == num_tensors and int(equal) > SHOWN
    with_optimizer = checkpoint_command("diff", run_dir, 2, 3, "--optimizer").split()
    assert int(with_optimizer[0]) > 2 * int(equal)


def test_diff_shows_largest_relative_changes_first(run_dir: Path) -> None:
    header, *rows, more, equal = checkpoint_command("diff", run_dir, 1, run_dir / "global_step_2", code=1).splitlines()
    assert header.split()[0] == "tensor" and len(rows) == SHOWN
    relative = [float(row.split()[-2]) for row in rows]
    assert relative == sorted(relative, reverse=True) and 0 < relative[-1] < 1
    assert equal.startswith("0 of ") and more.endswith("--all lists them")
    listed = checkpoint_command("diff", run_dir, 1, 2, "--all", code=1).splitlines()
    assert len(listed) - 2 == SHOWN + int(more.split()[2])


def test_diff_lists_missing_and_reshaped_tensors_first(copy: Path) -> None:
    names = ("model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight")
    change(copy / "global_step_3", names[0], None)
    change(copy / "global_step_3", names[1], torch.zeros(7))
    old = torch.load(copy / "global_step_2" / shard_name("model", 1, 0), weights_only=False)[names[2]]
    old = old.full_tensor() if hasattr(old, "full_tensor") else old
    change(copy / "global_step_3", names[2], old.to(torch.bfloat16))
    rows = checkpoint_command("diff", copy, 2, 3, code=1).splitlines()[1:-1]
    told = {row.split()[0]: row for row in rows}
    assert set(told) == {*names} and rows[-1].startswith(names[2])
    assert told[names[0]].endswith("only in A")
    assert told[names[1]].endswith(f"{tuple(old.shape)} against (7,)")
    assert told[names[2]].endswith("torch.float32 against torch.bfloat16")


def test_damaged_shard_is_an_error_not_a_difference(copy: Path) -> None:
    (copy / "global_step_3" / shard_name("model", 1, 0)).write_bytes(b"")
    assert "is damaged, or not a file of torch.save" in checkpoint_command("diff", copy, 2, 3, code=2)


def test_diff_rejects_paths_that_are_not_checkpoints(run_dir: Path) -> None:
    assert "has no checkpoint of step 9" in checkpoint_command("diff", run_dir, 1, 9, code=2)
    assert "is neither a step of" in checkpoint_command("diff", run_dir, 1, run_dir, code=2)
    assert "is not a directory" in checkpoint_command("diff", run_dir / "none", 1, 2, code=2)


def test_export_rejects_checkpoint_that_does_not_exist(run_dir: Path) -> None:
    assert "global_step_9 is not a directory" in checkpoint_command("export", run_dir / "global_step_9", code=2)


def test_diff_compares_every_rank_of_optimizer_state_without_rows(tmp_path: Path) -> None:
    """verl's FSDP1 saves each rank's part of the optimizer state as a plain tensor."""
    for step in (1, 2):
        checkpoint = tmp_path / f"global_step_{step}"
        checkpoint.mkdir()
        for rank in range(2):
            moment = torch.full((3,), float(rank * step))  # only rank 1's part changes
            state = {"step": torch.tensor(1.0), "exp_avg": moment}
            torch.save({"state": {0: state}}, checkpoint / shard_name(OPTIMIZER, 2, rank))
        torch.save({}, checkpoint / "data.pt")
    found = compare(tmp_path / "global_step_1", tmp_path / "global_step_2", [OPTIMIZER], lambda num_bytes: None)
    assert {each.name: each.largest for each in found} == {
        **{"optim.0.step": 0.0, "optim.0.exp_avg.rank0": 0.0},
        "optim.0.exp_avg.rank1": 1.0,
    }
