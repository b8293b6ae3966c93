"""Checkpoints that verl itself wrote are recognized, checked for completeness and never removed; on plain files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints import checkpoint_command, flip_byte, kept, retention, save
from verl_ext.checkpoint.manifest import TRACKER, Manifest, is_verl_checkpoint, list_checkpoints, why_incomplete
from verl_ext.checkpoint.resume import find_checkpoint
from verl_ext.checkpoint.retention import rotate
from verl_ext.checkpoint.save import commit_directory
from verl_ext.errors import UserError

EVERYTHING = ("model", "optim", "extra_state")


def save_as_verl(run_dir: Path, step: int, world_size: int = 2, kinds: tuple[str, ...] = EVERYTHING) -> Path:
    """Write the files of verl 0.7.0 in its order. `tests/integration/test_from_verl.py` uses real ones."""
    checkpoint = run_dir / f"global_step_{step}"
    (checkpoint / "huggingface").mkdir(parents=True)
    for kind in kinds:
        for rank in range(world_size):
            torch.save({"w": torch.rand(1000)}, checkpoint / f"{kind}_world_size_{world_size}_rank_{rank}.pt")
    (checkpoint / "huggingface/config.json").write_text("{}")
    (checkpoint / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world_size}, indent=4))
    torch.save({"_snapshot": {}}, checkpoint / "data.pt")
    (run_dir / TRACKER).write_text(str(step))
    return checkpoint


def find(run_dir: Path, **how: bool) -> tuple[Path | None, list[str]]:
    warnings: list[str] = []
    return find_checkpoint(run_dir, "auto", None, warnings.append, **how), warnings


def cut(path: Path, share: float) -> None:
    with path.open("rb+") as file:
        file.truncate(int(path.stat().st_size * share))


def remove_data_and_optimizer(checkpoint: Path) -> None:
    for name in ("data.pt", "optim_world_size_2_rank_0.pt", "optim_world_size_2_rank_1.pt"):
        (checkpoint / name).unlink()


def keep_only_extra_state_of_rank_0(checkpoint: Path) -> None:
    for path in checkpoint.glob("*.pt"):
        if path.name != "extra_state_world_size_2_rank_0.pt":
            path.unlink()


def test_complete_verl_checkpoint_is_found_and_described(tmp_path: Path) -> None:
    checkpoint = save_as_verl(tmp_path, 20)
    assert find(tmp_path) == (checkpoint, [])
    manifest = Manifest.read(checkpoint)
    assert (manifest.step, manifest.world_size, manifest.dropped) == (20, 2, ())
    assert manifest.files.keys() >= {"data.pt", "fsdp_config.json", "huggingface/config.json"}
    assert manifest.num_bytes == sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    assert manifest.time == max(path.stat().st_mtime for path in checkpoint.glob("*.pt"))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: cut(path / "optim_world_size_2_rank_1.pt", 0.5), "optim_world_size_2_rank_1.pt is truncated"),
        (lambda path: cut(path / "data.pt", 0), "data.pt is truncated"),
        (lambda path: (path / "model_world_size_2_rank_1.pt").unlink(), "model_world_size_2_rank_1.pt is missing"),
        (remove_data_and_optimizer, "it has no data.pt, which verl writes last"),
        (keep_only_extra_state_of_rank_0, "model_world_size_2_rank_0.pt is missing"),
        (
            lambda path: torch.save({}, path / "model_world_size_4_rank_3.pt"),
            "it holds shards of 2 and of 4 ranks; remove those of one run",
        ),
        (shutil.rmtree, "the tracker file names global_step_20, which does not exist"),
    ],
)
def test_incomplete_verl_checkpoint_is_skipped_with_warning(
    damage: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    older, newest = save_as_verl(tmp_path, 10), save_as_verl(tmp_path, 20)
    damage(newest)
    found, warnings = find(tmp_path)
    assert found == older
    assert sentence in warnings[0] and len(warnings) == 1


def test_verl_checkpoint_without_data_position_is_complete(tmp_path: Path) -> None:
    checkpoint = save_as_verl(tmp_path, 20)
    (checkpoint / "data.pt").unlink()
    shutil.rmtree(checkpoint / "huggingface")
    assert find(tmp_path) == (checkpoint, [])


def test_newer_verl_save_precedes_stale_tracker(tmp_path: Path) -> None:
    save_as_verl(tmp_path, 10)
    os.utime(tmp_path / TRACKER, (1, 1))
    newer = save_as_verl(tmp_path, 20)
    (tmp_path / TRACKER).write_text("10")
    os.utime(tmp_path / TRACKER, (2, 2))  # verl was killed between data.pt and the tracker
    found, warnings = find(tmp_path)
    assert found == newer and "global_step_20 was completed later" in warnings[0]


def test_verl_checkpoint_without_optimizer_needs_model_only_load(tmp_path: Path) -> None:
    checkpoint = save_as_verl(tmp_path, 20, kinds=("model",))
    assert find(tmp_path, with_optimizer=False) == (checkpoint, [])
    with pytest.raises(
        UserError, match=r"verl saved it without optimizer state; remove optimizer from .*load_contents"
    ):
        find(tmp_path)


def test_checkpoint_with_lost_manifest_is_not_taken_for_verl(tmp_path: Path) -> None:
    checkpoint = save_as_verl(tmp_path, 20)
    (checkpoint / "export_plan.json").write_text("{}")
    assert not is_verl_checkpoint(checkpoint)
    assert why_incomplete(checkpoint) == "it has no manifest.json, so it was never completed"


def test_rotation_neither_removes_nor_counts_verl_checkpoints(tmp_path: Path) -> None:
    stock = [save_as_verl(tmp_path, step) for step in (10, 20, 30)]
    cut(stock[2] / "data.pt", 0.5)
    before = {path: path.read_bytes() for each in stock for path in each.rglob("*") if path.is_file()}
    for step in (5, 15, 25):  # a run that started over
        save(tmp_path, step, val=1.0)
    removed = rotate(tmp_path, *retention(2, drop_optimizer_of_best=True), 25, pytest.fail)
    assert [path.name for path in removed] == ["global_step_5"]
    assert kept(tmp_path) == [10, 15, 20, 25, 30]
    assert before == {path: path.read_bytes() for path in before}


def test_replaced_verl_checkpoint_is_renamed_and_kept(tmp_path: Path) -> None:
    cut(save_as_verl(tmp_path, 20) / "data.pt", 0.5)
    ours = save(tmp_path / "ours", 20)
    commit_directory(ours, tmp_path / "global_step_20", Manifest.read(ours))
    rotate(tmp_path, *retention(1), 20, pytest.fail)
    former = next(tmp_path.glob("global_step_20_replaced_*"))
    assert is_verl_checkpoint(former) and not is_verl_checkpoint(tmp_path / "global_step_20")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["global_step_20"]


def test_commands_label_verl_checkpoints(tmp_path: Path) -> None:
    save_as_verl(tmp_path, 10)
    save_as_verl(tmp_path, 20, kinds=("model",))
    cut(save_as_verl(tmp_path, 30) / "data.pt", 0.5)
    save(tmp_path, 15)
    lines = {line.split()[0]: line for line in checkpoint_command("ls", tmp_path).splitlines()}
    assert "complete, written by verl itself  " in lines["10"] and lines["10"].endswith("verl itself wrote it")
    assert "complete, written by verl itself, without optimizer, without extra" in lines["20"]
    assert "incomplete, written by verl itself  " in lines["30"]
    assert lines["global_step_30:"].startswith("global_step_30: its file data.pt is truncated")
    assert [entry["written_by_verl"] for entry in json.loads(checkpoint_command("ls", tmp_path, "--json"))] == [
        True,
        True,
        False,
        True,
    ]
    verified = checkpoint_command("verify", tmp_path, code=1)
    assert "global_step_10: complete, 9 files" in verified and "but every checksum is correct" in verified
    assert "global_step_30: damaged or incomplete\n  data.pt is damaged (File is not a zip file)" in verified
    checkpoint_command("prune", tmp_path, "--max-to-keep", 1, "--yes")
    assert kept(tmp_path) == [10, 15, 20, 30]
    checkpoint_command("prune", tmp_path, "--step", 10, 30, "--yes")  # by name alone
    assert kept(tmp_path) == [15, 20]


def test_verify_finds_flipped_byte_by_zip_checksum(tmp_path: Path) -> None:
    shard = save_as_verl(tmp_path, 10) / "model_world_size_2_rank_1.pt"
    flip_byte(shard)
    assert find(tmp_path)[0] == shard.parent  # the quick check does not read it
    assert f"{shard.name} is damaged (Bad CRC-32" in checkpoint_command("verify", tmp_path, code=1)
    assert "cannot be exported" in checkpoint_command(
        "export", tmp_path, "--step", 10, "--output", tmp_path / "model", code=2
    )


def test_export_needs_model_configuration(tmp_path: Path) -> None:
    checkpoint = save_as_verl(tmp_path, 10)
    shutil.rmtree(checkpoint / "huggingface")
    message = checkpoint_command("export", tmp_path, "--output", tmp_path / "model", code=2)
    assert "has no huggingface/config.json; copy it and the tokenizer" in message


def test_renamed_verl_checkpoint_is_rejected(tmp_path: Path) -> None:
    renamed = save_as_verl(tmp_path, 20).rename(tmp_path / "latest")
    with pytest.raises(UserError, match="global_step_N"):
        find_checkpoint(tmp_path / "run", "auto", str(renamed), pytest.fail)


@pytest.mark.parametrize(("offset", "value"), [(10, 99), (8, 1), (42, 255)], ids=["compression", "encryption", "place"])
def test_damaged_zip_directory_is_reported(offset: int, value: int, tmp_path: Path) -> None:
    save_as_verl(tmp_path, 20)
    path = tmp_path / "global_step_20" / "model_world_size_2_rank_0.pt"
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + offset] = value
    path.write_bytes(content)
    assert f"{path.name} is damaged" in checkpoint_command("verify", tmp_path, code=1)
