"""The steps of a checkpoint commit: a crash between any two of them loses no complete checkpoint."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.checkpoints import OPTIMIZER, retention, save
from tests.helpers.trainer import make_trainer, small_config
from verl_ext.checkpoint import rebuild
from verl_ext.checkpoint.config import ExportConfig
from verl_ext.checkpoint.lease import hold_lease
from verl_ext.checkpoint.manifest import MODEL, TRACKER, Manifest, damaged_files, shard_name, why_incomplete
from verl_ext.checkpoint.rebuild import rebuild_export, write_deferred_export
from verl_ext.checkpoint.retention import rotate
from verl_ext.checkpoint.save import FileWriter, commit_directory, sync_and_digest, write_manifest
from verl_ext.errors import UserError


def refuse(*arguments: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def refuse_at(function: Callable[..., Any], word: str) -> Callable[..., Any]:
    """Wrap a function so that it fails if one of its arguments is a path that contains the word."""

    def called(*arguments: Any, **options: Any) -> Any:
        if any(word in str(argument) for argument in arguments):
            refuse()
        return function(*arguments, **options)

    return called


def test_files_are_synced_before_rename_and_tracker_is_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def recorded(name: str, function: Callable[..., Any], named: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            steps.append(f"{name} {Path(named(*arguments)).relative_to(tmp_path)}")
            return function(*arguments, **options)

        return called

    temporary = tmp_path / "global_step_1.tmp"
    (temporary / "huggingface").mkdir(parents=True)
    monkeypatch.setattr("os.fsync", recorded("fsync", os.fsync, lambda file: os.readlink(f"/proc/self/fd/{file}")))
    monkeypatch.setattr("os.rename", recorded("rename to", os.rename, lambda source, target: target))
    monkeypatch.setattr("os.replace", recorded("rename to", os.replace, lambda source, target: target))
    with FileWriter() as files:
        entries = {"model.pt": files.write_object(temporary / "model.pt", {"w": torch.zeros(3)})}
        entries["huggingface/config.json"] = files.write_bytes(temporary / "huggingface/config.json", b"{}")
    written, steps[:] = set(steps), []
    assert written == {"fsync global_step_1.tmp/model.pt", "fsync global_step_1.tmp/huggingface/config.json"}
    commit_directory(temporary, tmp_path / "global_step_1", Manifest(1, 1, "", entries))
    assert steps == [
        "fsync global_step_1.tmp/manifest.json.tmp",
        "rename to global_step_1.tmp/manifest.json",
        "fsync global_step_1.tmp",
        "fsync global_step_1.tmp",
        "fsync global_step_1.tmp/huggingface",
        "rename to global_step_1",
        "fsync .",
        f"fsync {TRACKER}.tmp",
        f"rename to {TRACKER}",
        "fsync .",
    ]
    assert why_incomplete(tmp_path / "global_step_1") is None


@pytest.mark.usefixtures("one_rank")
def test_save_removes_leftovers_then_checks_space(
    quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(small_config(quickstart, tmp_path))
    leftovers = [tmp_path / "global_step_1.tmp", tmp_path / "global_step_5.removing"]
    for path in leftovers:
        path.mkdir()
    free_while_clean = 10**12

    def free_bytes(directory: Path) -> int:
        return 0 if any(path.exists() for path in leftovers) else free_while_clean

    monkeypatch.setattr("verl_ext.checkpoint.save.free_bytes", free_bytes)
    trainer.save_checkpoint(1)
    trainer.checkpoint_manager.wait()
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"]
    free_while_clean = 1000
    with pytest.raises(UserError, match=r"^global_step_2 cannot be saved: it needs .*, then run the same command"):
        trainer.save_checkpoint(2)
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"]
    assert why_incomplete(tmp_path / "global_step_1") is None


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("rank", [0, 4])
def test_expected_size_covers_files_on_disk(
    rank: int, quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that passes the space check must not fail halfway."""
    require_space = Mock()
    monkeypatch.setattr("verl_ext.checkpoint.save.require_space", require_space)
    trainer = make_trainer(small_config(quickstart, tmp_path, f"model.lora_rank={rank}"))
    trainer.training_step(next(trainer.batches()))  # creates the state of the optimizer
    trainer.save_checkpoint(1)
    trainer.checkpoint_manager.wait()
    on_disk = sum(path.stat().st_blocks * 512 for path in (tmp_path / "global_step_1").rglob("*"))
    _, expected = require_space.call_args.args
    assert on_disk <= expected <= 1.05 * on_disk


def test_digest_describes_written_data_not_disk_content(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with FileWriter() as files:
        entry = files.write_bytes(path, b"one")
        path.write_bytes(b"two")
    assert entry != sync_and_digest(path)


@pytest.mark.parametrize("is_held", [False, True])
def test_failed_commit_restores_previous_checkpoint(
    is_held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save(tmp_path, 1)
    (checkpoint / "first").touch()
    if is_held:
        (checkpoint / "keep").touch()
    with monkeypatch.context() as patch:
        patch.setattr("os.rename", refuse_at(os.rename, "global_step_1.tmp"))
        with pytest.raises(OSError, match="Input/output"):
            save(tmp_path, 1)
    assert why_incomplete(checkpoint) is None and (checkpoint / "first").exists()
    assert sorted(path.name for path in tmp_path.glob("global_*")) == ["global_step_1", "global_step_1.tmp"]


def test_manifest_drops_optimizer_before_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path, step, val=float(step))
    warnings: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        rotate(tmp_path, *retention(1, keep_best=1, drop_optimizer_of_best=True), 2, warnings.append)
    best = tmp_path / "global_step_1"
    assert "global_step_1 could not be cleaned up" in warnings[0]
    assert all((best / name).exists() for name in OPTIMIZER)
    assert Manifest.read(best).dropped == ("optimizer",) and why_incomplete(best) is None


def checkpoint_to_export(run_dir: Path) -> Path:
    """Create a checkpoint of one tensor whose export has been deferred."""
    checkpoint = run_dir / "global_step_1"
    (checkpoint / "huggingface").mkdir(parents=True)
    (checkpoint / "huggingface/config.json").write_text("{}")
    torch.save({"w": torch.zeros(3)}, checkpoint / shard_name(MODEL, 1, 0))
    names = ["huggingface/config.json", shard_name(MODEL, 1, 0)]
    files = {name: sync_and_digest(checkpoint / name) for name in names}
    write_manifest(checkpoint, Manifest(1, 1, "", files, deferred=("huggingface",)))
    return checkpoint


def test_crash_during_export_leaves_checkpoint_without_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = checkpoint_to_export(tmp_path)
    rebuild_export(checkpoint, None, "fp32", 1.0)
    weights = "huggingface/model.safetensors"
    assert weights in Manifest.read(checkpoint).files and why_incomplete(checkpoint) is None

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", refuse_at(os.replace, f"partial/{Path(weights).name}"))
        with pytest.raises(Exception, match="Input/output"):
            rebuild_export(checkpoint, None, "bf16", 1.0)
    assert weights not in Manifest.read(checkpoint).files and why_incomplete(checkpoint) is None
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("verl_ext.checkpoint.rebuild.write_weights", Mock(side_effect=KeyboardInterrupt))
        rebuild_export(checkpoint, None, "bf16", 1.0)
    assert not list(checkpoint.glob("*.partial"))
    rebuild_export(checkpoint, None, "bf16", 1.0)
    assert weights in Manifest.read(checkpoint).files and why_incomplete(checkpoint) is None
    write_manifest(checkpoint, replace(Manifest.read(checkpoint), step=2))
    assert why_incomplete(checkpoint) == "its manifest belongs to step 2"


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_second_export_to_same_directory_is_refused(
    is_elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would delete the files that the first one is writing."""
    checkpoint = checkpoint_to_export(tmp_path)
    output = tmp_path / "models/model" if is_elsewhere else None
    refused: list[str] = []

    def write_during_export(*arguments: Any) -> None:
        with monkeypatch.context() as patch, pytest.raises(UserError) as caught:
            patch.setattr(rebuild, "write_weights", Mock(side_effect=AssertionError("both write")))
            rebuild_export(checkpoint, output, "fp32", 1.0)
        refused.append(str(caught.value))
        write_weights(*arguments)

    write_weights = rebuild.write_weights
    with monkeypatch.context() as patch:
        patch.setattr(rebuild, "write_weights", write_during_export)
        target = rebuild_export(checkpoint, output, "fp32", 1.0)
    assert refused == [f"another process is writing an export to {target}; wait for it, or stop it"]
    assert load_file(target / "model.safetensors")["w"].tolist() == [0, 0, 0] and not damaged_files(checkpoint)
    assert not [*target.parent.glob("*.lock"), *target.parent.glob("*.partial")]


def test_checkpoint_that_is_removed_before_its_deferred_export_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = checkpoint_to_export(tmp_path)

    @contextmanager
    def lock_of_removed(target: Path, announce: object) -> Iterator[bool]:
        (checkpoint / "manifest.json").unlink()
        yield True

    monkeypatch.setattr(rebuild, "_export_lock", lock_of_removed)
    write_deferred_export(checkpoint, ExportConfig(), {})
    assert "warning: global_step_1 has no export yet: " in capsys.readouterr().err


def test_start_waits_for_running_export_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint, is_waiting = checkpoint_to_export(tmp_path), Event()
    start = Thread(target=write_deferred_export, args=(checkpoint, ExportConfig(), {}))

    def announce(message: str, stream: object) -> None:
        assert message == "Waiting for another process that is writing global_step_1/huggingface/"
        is_waiting.set()

    def write_during_start(*arguments: Any) -> None:
        start.start()
        assert is_waiting.wait(60)
        write_weights(*arguments)

    write_weights = rebuild.write_weights
    monkeypatch.setattr(rebuild, "print_line", announce)  # refuses the announcement of a second export
    monkeypatch.setattr(rebuild, "write_weights", write_during_start)
    rebuild_export(checkpoint, None, "fp32", 1.0)
    start.join()
    assert Manifest.read(checkpoint).deferred == () and not damaged_files(checkpoint)
    assert not [*checkpoint.glob("*.lock"), *checkpoint.glob("*.partial")] and not capfd.readouterr().err


def test_export_that_others_read_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = checkpoint_to_export(tmp_path)
    with hold_lease(checkpoint):  # on the shards
        rebuild_export(checkpoint, None, "fp32", 1.0)
    before = (checkpoint / "huggingface/model.safetensors").read_bytes()
    refusal = f"being read by process {os.getpid()} on .* --output DIR"
    with hold_lease(checkpoint):
        with pytest.raises(UserError, match=refusal):
            rebuild_export(checkpoint, None, "bf16", 1.0)
        rebuild_export(checkpoint, tmp_path / "model", "bf16", 1.0)
    write_weights, reader = rebuild.write_weights, ExitStack()
    with reader, monkeypatch.context() as patch, pytest.raises(UserError, match=refusal):

        def read_during_export(*arguments: Any) -> None:
            write_weights(*arguments)
            reader.enter_context(hold_lease(checkpoint))

        patch.setattr(rebuild, "write_weights", read_during_export)
        rebuild_export(checkpoint, None, "bf16", 1.0)
    assert (checkpoint / "huggingface/model.safetensors").read_bytes() == before and not damaged_files(checkpoint)
    rebuild_export(checkpoint, None, "bf16", 1.0)
    assert (checkpoint / "huggingface/model.safetensors").read_bytes() != before and not damaged_files(checkpoint)


def test_export_removes_files_of_killed_export(tmp_path: Path) -> None:
    checkpoint = checkpoint_to_export(tmp_path)
    for name in ("huggingface.partial", "huggingface.0123abcd.partial"):
        (checkpoint / name).mkdir()
    (checkpoint / "huggingface.lock").touch()
    rebuild_export(checkpoint, None, "fp32", 1.0)
    assert {path.name for path in checkpoint.iterdir()} == {"huggingface", "manifest.json", shard_name(MODEL, 1, 0)}
