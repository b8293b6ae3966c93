"""A run directory on a disk with 0 bytes free: what still works, and that no temporary file is left."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.checkpoints import checkpoint_command, kept, save
from tests.helpers.faults import fill, small_disk
from verl_ext.checkpoint.config import ExportConfig
from verl_ext.checkpoint.hf_export import config_and_tokenizer_files
from verl_ext.checkpoint.manifest import EXPORT, MODEL, Manifest, shard_name, why_incomplete
from verl_ext.checkpoint.rebuild import write_deferred_export
from verl_ext.checkpoint.retention import find_leftovers
from verl_ext.checkpoint.save import sync_and_digest, write_manifest
from verl_ext.controller.latency import FEATURES, LatencyModel
from verl_ext.errors import UserError
from verl_ext.files import RUN_LOCK, hold_run_lock, replace_file, replacing, write_errors
from verl_ext.launch.__main__ import parse_arguments
from verl_ext.launch.configure import configure
from verl_ext.launch.ranks import run_ranks
from verl_ext.launch.run import Launch, clean_up_finished_run, run_until_finished
from verl_ext.processes import StopSignals
from verl_ext.trainer.__main__ import report_to_launcher


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def run_dir(disk: Path) -> Path:
    """Steps 10 to 40 on a full disk; 20 is kept only because it is the best."""
    run_dir = disk / "run"
    for step, loss in ((10, 2.0), (20, 1.5), (30, 3.0), (40, 2.5)):
        save(run_dir, step, val=loss)
    checkpoint = "{keep_best: 1, drop_optimizer_of_best: true}"
    (run_dir / "config.yaml").write_text(f"trainer: {{max_ckpt_to_keep: 1, checkpoint: {checkpoint}}}\n")
    fill(disk)
    return run_dir


def free_bytes(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def test_run_lock_works_on_full_disk(run_dir: Path) -> None:
    assert free_bytes(run_dir) == 0
    with hold_run_lock(run_dir):
        assert (run_dir / RUN_LOCK).read_text() == ""
        with pytest.raises(UserError, match="in use by another launch"):
            with hold_run_lock(run_dir):
                pass


def test_error_of_run_is_reported_although_lock_file_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, size: int) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with pytest.raises(UserError, match="the run's error"), hold_run_lock(tmp_path):
        monkeypatch.setattr(os, "ftruncate", refuse)
        raise UserError("the run's error")


def test_prune_works_without_room_for_lock_file(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = Path.open

    def refuse(path: Path, *options: str) -> object:
        if path.name == RUN_LOCK:
            raise OSError(errno.EDQUOT, "Disk quota exceeded", str(path))
        return opened(path, *options)

    monkeypatch.setattr(Path, "open", refuse)
    with hold_run_lock(run_dir):
        assert not (run_dir / RUN_LOCK).exists()
    assert "Disk quota exceeded" in capsys.readouterr().err


def test_prune_frees_space_on_full_disk(run_dir: Path) -> None:
    unfinished = run_dir / "global_step_50.tmp"
    unfinished.mkdir()
    (run_dir.parent / "filler").rename(unfinished / "model.pt")
    assert free_bytes(run_dir) == 0
    told = checkpoint_command("prune", run_dir, "--yes")
    assert all(name in told for name in ("global_step_10", "global_step_30", "global_step_50.tmp"))
    assert kept(run_dir) == [20, 40]
    assert Manifest.read(run_dir / "global_step_20").dropped == ("optimizer",)  # written to the freed space
    assert find_leftovers(run_dir) == [] and free_bytes(run_dir) > 1 << 20


def test_prune_by_step_frees_space_on_full_disk(run_dir: Path) -> None:
    checkpoint_command("prune", run_dir, "--step", 10, 30, "--yes")
    assert kept(run_dir) == [20, 40]


def test_failed_replace_keeps_file_and_leaves_no_leftover(run_dir: Path) -> None:
    before = sorted(run_dir.rglob("*"))
    config = (run_dir / "config.yaml").read_text()
    with pytest.raises(OSError, match="No space left"):
        replace_file(run_dir / "config.yaml", ["x" * 10_000])
    with pytest.raises(OSError, match="No space left"), replacing(run_dir / "figure.png") as temporary:
        temporary.write_bytes(bytes(10_000))
    assert sorted(run_dir.rglob("*")) == before
    assert (run_dir / "config.yaml").read_text() == config


@pytest.mark.parametrize("num_free", [0, 500_000])
def test_deferred_export_without_space_is_only_a_warning(
    num_free: int, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, shard = disk / "global_step_1", shard_name(MODEL, 1, 0)
    (checkpoint / EXPORT).mkdir(parents=True)
    (checkpoint / EXPORT / "config.json").write_text("{}")
    torch.save({"w": torch.zeros(1 << 20)}, checkpoint / shard)
    files = {name: sync_and_digest(checkpoint / name) for name in (f"{EXPORT}/config.json", shard)}
    write_manifest(checkpoint, Manifest(1, 1, "", files, deferred=(EXPORT,)))
    before = sorted(checkpoint.rglob("*"))
    filler = fill(disk)
    os.truncate(filler, filler.stat().st_size - num_free)
    write_deferred_export(checkpoint, ExportConfig(dtype="fp32"), {})
    assert "global_step_1 has no export yet" in capsys.readouterr().err
    assert sorted(checkpoint.rglob("*")) == before
    filler.unlink()
    write_deferred_export(checkpoint, ExportConfig(dtype="fp32"), {})
    assert Manifest.read(checkpoint).deferred == () and why_incomplete(checkpoint) is None


def test_interrupted_write_of_latency_model_leaves_no_file(run_dir: Path) -> None:
    """A later start would refuse a truncated file instead of fitting the model."""
    path = run_dir / "latency_model.json"
    with pytest.raises(UserError, match="latency_model"):
        LatencyModel({part: dict.fromkeys(names, 1.0) for part, names in FEATURES.items()}, 1.0, "", "").save(path)
    assert not list(run_dir.glob(f"{path.name}*"))


@pytest.fixture
def launch(quickstart: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Launch an SFT run up to the start of its ranks."""

    def reached(self: Launch, restarts: int) -> None:
        raise UserError("the ranks would start")

    monkeypatch.setattr(Launch, "run", reached)
    files = [f"data.train_files={quickstart}/train.parquet", f"data.val_files={quickstart}/val.parquet"]
    model = f"model.partial_pretrain={quickstart}/model"
    config = configure(
        parse_arguments(["sft", "2", "prepare=[]", f"trainer.default_local_dir={disk}/run", model, *files])
    )

    def start() -> None:
        run_until_finished(config, StopSignals(), restarts=0, provenance={})

    return start


def test_launch_on_full_disk_names_unwritable_file(launch: Callable[[], None], disk: Path) -> None:
    fill(disk)
    with pytest.raises(UserError, match=r"run\.json \(No space left on device\)"):
        launch()
    assert [path.name for path in (disk / "run").iterdir()] == [RUN_LOCK]


def test_launch_removes_leftovers_that_fill_disk(launch: Callable[[], None], disk: Path) -> None:
    leftover = disk / "run" / "global_step_4.tmp.removing"
    leftover.mkdir(parents=True)
    fill(leftover)
    assert free_bytes(disk) == 0
    with pytest.raises(UserError, match="the ranks would start"):
        launch()
    assert sorted(path.name for path in (disk / "run").iterdir()) == ["console.log", "run.json", RUN_LOCK]


def test_leftovers_of_finished_run_are_removed_unless_locked(tmp_path: Path) -> None:
    save(tmp_path, 1)
    clean_up_finished_run(tmp_path)
    assert not (tmp_path / RUN_LOCK).exists()
    directory, file = tmp_path / "global_step_0.removing", tmp_path / "run.json.tmp"
    directory.mkdir()
    with hold_run_lock(tmp_path):
        clean_up_finished_run(tmp_path)
    assert directory.exists()
    clean_up_finished_run(tmp_path)
    assert not directory.exists() and kept(tmp_path) == [1]
    file.touch()
    os.utime(file, (0, 0))
    clean_up_finished_run(tmp_path)
    assert not file.exists()


def test_full_temporary_directory_is_named(
    disk: Path, quickstart: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    model = AutoModelForCausalLM.from_pretrained(quickstart / "model")
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    fill(disk)
    with pytest.raises(UserError, match=f"cannot write temporary files in {disk} .No space left.*set TMPDIR"):
        config_and_tokenizer_files(model, tokenizer, torch.float32)
    with pytest.raises(UserError, match=f"cannot write temporary files in {disk} .No space left.*set TMPDIR"):
        run_ranks(configure(parse_arguments(["sft", "1"])), StopSignals())
    reply = disk / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(reply))
    report_to_launcher("the data is empty")
    assert capsys.readouterr().err == "error: the data is empty\n" and not reply.exists()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free disk space"),
        (errno.EFBIG, "raise the limit on file sizes (`ulimit -f`)"),
        (errno.EROFS, "mount its file system writable before you resume"),
        (errno.ENOENT, "its directory was moved or removed; move it back before you resume"),
        (errno.ESTALE, "its directory was moved or removed; move it back before you resume"),
        (errno.EACCES, "make the directory and the file writable"),
        (errno.EIO, "free disk space or make the directory writable"),
    ],
)
def test_failed_write_names_suitable_remedy(number: int, remedy: str) -> None:
    with pytest.raises(UserError) as told, write_errors(Path("file")):
        raise OSError(number, "reason")
    assert str(told.value) == f"cannot write file (reason); {remedy}"
