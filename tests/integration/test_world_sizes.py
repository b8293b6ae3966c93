"""A run saved on some number of ranks goes on on any other, and its checkpoints can be read without any."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.helpers import ROOT
from tests.helpers.commands import NUM_STEPS, Run

SAVED_AT = 2


def run_on(num_ranks: int, quickstart: Path, run_dir: Path, *overrides: str) -> Run:
    """Train to the end on so many ranks, without dropout, whose random numbers belong to the ranks."""
    run = Run(quickstart, run_dir, f"model.partial_pretrain={quickstart}/model", "trainer.max_ckpt_to_keep=null")
    run.words[run.words.index("2")] = str(num_ranks)
    result = run.start(*overrides)
    assert result.returncode == 0, result.stderr
    return run


@pytest.fixture(scope="module")
def uninterrupted(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """Runs on one rank, and on two that save in the background."""
    in_background = "trainer.checkpoint.async_save=true"
    return {
        1: run_on(1, quickstart, tmp_path_factory.mktemp("one")),
        2: run_on(2, quickstart, tmp_path_factory.mktemp("two"), in_background),
    }


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_losses_go_on_on_another_number_of_ranks(
    before: int, after: int, uninterrupted: dict[int, Run], quickstart: Path, tmp_path: Path
) -> None:
    name = f"global_step_{SAVED_AT}"
    shutil.copytree(uninterrupted[before].run_dir / name, tmp_path / "run" / name)
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    run = run_on(after, quickstart, tmp_path / "run")
    losses, expected = run.losses(1), uninterrupted[before].losses(1)
    assert sorted(losses) == list(range(SAVED_AT + 1, NUM_STEPS + 1))
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step], rel=1e-5)
    manifest = json.loads((run.last_checkpoint / "manifest.json").read_text())
    assert manifest["world_size"] == after


def test_saving_in_the_background_is_recorded_and_complete(uninterrupted: dict[int, Run]) -> None:
    rows = [json.loads(line) for line in (uninterrupted[2].run_dir / "metrics.jsonl").read_text().splitlines()]
    saved = {row["step"] for row in rows if "time/train/save_s" in row}
    written = {row["step"]: row for row in rows if "time/checkpoint/write_s" in row}
    assert saved == written.keys() == {2, 4, 6}
    assert all(row["system/disk_free_gib"] > 0 for row in written.values())


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m verl_ext.checkpoint`."""
    arguments = [sys.executable, "-m", "verl_ext.checkpoint", *map(str, words)]
    return subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_checkpoints_are_compared_tensor_by_tensor(uninterrupted: dict[int, Run]) -> None:
    one, two = uninterrupted[1], uninterrupted[2]
    same = command("diff", two.run_dir, NUM_STEPS, two.last_checkpoint, "--optimizer")
    assert (same.returncode, same.stderr) == (0, "")
    count = len(torch.load(one.last_checkpoint / "model_world_size_1_rank_0.pt", weights_only=False))
    assert f"{4 * count} of {4 * count} tensors are equal bit for bit" in same.stdout
    other = command("diff", one.run_dir, SAVED_AT, two.last_checkpoint)
    assert other.returncode == 1
    assert f"0 of {count} tensors are equal bit for bit" in other.stdout


def test_an_export_made_from_the_shards_is_the_one_that_training_wrote(
    uninterrupted: dict[int, Run], tmp_path: Path
) -> None:
    run = uninterrupted[2]
    result = command("export", run.run_dir, "--step", SAVED_AT, "--output", tmp_path / "model")
    assert (result.returncode, result.stderr) == (0, "")
    written = run.run_dir / f"global_step_{SAVED_AT}/huggingface"
    assert {path.name for path in (tmp_path / "model").iterdir()} == {path.name for path in written.iterdir()}
    assert (tmp_path / "model/model.safetensors").read_bytes() == (written / "model.safetensors").read_bytes()


def test_a_damaged_export_is_rebuilt_in_place(uninterrupted: dict[int, Run], tmp_path: Path) -> None:
    checkpoint = tmp_path / "run/global_step_6"
    shutil.copytree(uninterrupted[2].last_checkpoint, checkpoint)
    export = checkpoint / "huggingface/model.safetensors"
    before = {name: tensor.clone() for name, tensor in load_file(export).items()}  # which maps the file
    export.write_bytes(b"cut")
    assert command("verify", tmp_path / "run").returncode == 1
    rebuilt = command("export", checkpoint, "--dtype", "fp32", "--max-shard-gib", "0.002")
    assert (rebuilt.returncode, rebuilt.stderr) == (0, "")
    assert command("verify", tmp_path / "run").returncode == 0
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "huggingface", dtype="auto")
    assert model.dtype == torch.float32
    assert all(torch.equal(tensor.to(torch.bfloat16), before[name]) for name, tensor in model.state_dict().items())


def test_an_export_from_damaged_shards_is_refused(uninterrupted: dict[int, Run], tmp_path: Path) -> None:
    shutil.copytree(uninterrupted[2].last_checkpoint, tmp_path / "run/global_step_6")
    shard = tmp_path / "run/global_step_6/model_world_size_2_rank_1.pt"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    (shard.parent / "huggingface/model.safetensors").unlink()  # what is to be mended must not hide what cannot be
    result = command("export", tmp_path / "run", "--step", 6, "--output", tmp_path / "model")
    assert result.returncode == 2
    assert "model_world_size_2_rank_1.pt" in result.stderr
    assert not (tmp_path / "model").exists()
