"""`python -m verl_ext.checkpoint diff`: differences between two checkpoints, tensor by tensor."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints import checkpoint_command
from tests.helpers.trainer import make_trainer, small_config
from verl_ext.checkpoint.__main__ import SHOWN
from verl_ext.checkpoint.manifest import shard_name

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
