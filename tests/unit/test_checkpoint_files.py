"""The commit protocol, resume selection and rotation, on plain files."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.checkpoints import checkpoint_command, retention
from verl_ext.checkpoint import manifest, resume
from verl_ext.checkpoint.config import CheckpointConfig
from verl_ext.checkpoint.manifest import TRACKER, Manifest, exported_checkpoints, list_checkpoints, why_incomplete
from verl_ext.checkpoint.resume import agree_on_checkpoint, find_checkpoint, verify_on_all_ranks
from verl_ext.checkpoint.retention import rotate
from verl_ext.checkpoint.save import add_metrics, commit_directory, sync_and_digest
from verl_ext.errors import TransientError, UserError, exit_on_user_error
from verl_ext.launch.configure import newest_export


def commit(run_dir: Path, step: int, world_size: int = 2) -> Path:
    temporary = run_dir / f"global_step_{step}.tmp"
    (temporary / "huggingface").mkdir(parents=True)
    for name in ("model.pt", "huggingface/config.json"):
        (temporary / name).write_text(f"{name} of step {step}")
    files = {name: sync_and_digest(temporary / name) for name in ("model.pt", "huggingface/config.json")}
    manifest = Manifest(step, world_size, "digest", files, time=time.time())
    commit_directory(temporary, run_dir / f"global_step_{step}", manifest)
    return run_dir / f"global_step_{step}"


def find(run_dir: Path, mode: str = "auto", path: str | None = None) -> tuple[Path | None, list[str]]:
    warnings: list[str] = []
    return find_checkpoint(run_dir, mode, path, warnings.append), warnings


def test_committed_directory_is_complete_and_tracked(tmp_path: Path) -> None:
    checkpoint = commit(tmp_path, 10)
    assert why_incomplete(checkpoint) is None
    assert (tmp_path / TRACKER).read_text() == "10"  # a plain integer, as verl's own tools read it
    assert find(tmp_path) == (checkpoint, [])
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert (manifest["step"], manifest["world_size"], set(manifest["files"])) == (
        10,
        2,
        {"model.pt", "huggingface/config.json"},
    )


def test_saving_same_step_again_replaces_checkpoint(tmp_path: Path) -> None:
    first = commit(tmp_path, 10)
    (first / "extra").write_text("from the first time")
    assert not (commit(tmp_path, 10) / "extra").exists()
    assert list_checkpoints(tmp_path) == [tmp_path / "global_step_10"]
    rotate(tmp_path, *retention(None), 10, pytest.fail)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["global_step_10"]


def test_replaced_best_checkpoint_is_renamed_with_its_record(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    (tmp_path / "best_checkpoint.json").write_text('{"step": 10}')
    commit(tmp_path, 10)
    assert len(list(tmp_path.glob("global_step_10_replaced_*"))) == 1
    assert len(list(tmp_path.glob("best_checkpoint_replaced_*.json"))) == 1
    assert not (tmp_path / "best_checkpoint.json").exists()  # it would name weights that were not selected


@pytest.mark.parametrize("failing", ["global_step_10.tmp", "global_step_10"])
def test_failed_commit_keeps_checkpoint_and_its_selection(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (commit(tmp_path, 10) / "first").touch()
    (tmp_path / "best_checkpoint.json").write_text('{"step": 10}')
    rename, failed = os.rename, []

    def fail_once(source: Path, target: Path) -> None:
        if source.name == failing and not failed:
            failed.append(source)
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_once)
        with pytest.raises(OSError, match="Input/output error"):
            commit(tmp_path, 10)
    assert (tmp_path / "global_step_10/first").exists()
    assert (tmp_path / "best_checkpoint.json").read_text() == '{"step": 10}'
    assert not list(tmp_path.glob("*_replaced_*"))


def test_metrics_of_checkpoint_with_damaged_manifest_are_refused(tmp_path: Path) -> None:
    (commit(tmp_path, 10) / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"its manifest.json cannot be read .*; restore"):
        add_metrics(tmp_path / "global_step_10", {"val/loss": 1.0})


def test_replaced_protected_checkpoint_is_renamed_and_kept(tmp_path: Path) -> None:
    (commit(tmp_path, 10) / "keep").touch()
    commit(tmp_path, 10)
    former = next(tmp_path.glob("global_step_10_replaced_*"))
    assert (former / "keep").exists()
    assert find(tmp_path) == (tmp_path / "global_step_10", [])
    assert list_checkpoints(tmp_path) == [tmp_path / "global_step_10"]


def test_stale_tracker_is_ignored_unless_edited_by_user(tmp_path: Path) -> None:
    older, newer = commit(tmp_path, 10), commit(tmp_path, 20)
    tracker = tmp_path / TRACKER
    tracker.write_text("10")
    saved = Manifest.read(newer).time
    os.utime(tracker, (saved - 5, saved - 5))  # as the save of step 10 left it
    found, warnings = find(tmp_path)
    assert found == newer
    assert "global_step_20 was completed later" in warnings[0]
    os.utime(tracker, (saved + 5, saved + 5))  # as a user's editor left it
    assert find(tmp_path) == (older, [])


def test_checkpoints_of_abandoned_branch_come_last(tmp_path: Path) -> None:
    for step in (100, 200, 50, 150):  # after step 200, a restart with resume_mode=disable
        commit(tmp_path, step)
        os.utime(tmp_path / TRACKER, (later := time.time() + 5, later))
    for path in tmp_path.glob("global_step_*"):
        (path / "huggingface/model.safetensors").touch()
    assert newest_export(tmp_path, 1).parent.name == "global_step_150"
    assert [path.name for path, _ in exported_checkpoints(tmp_path)] == [
        f"global_step_{step}" for step in (150, 100, 50, 200)
    ]
    (tmp_path / "global_step_150/model.pt").unlink()
    assert find(tmp_path)[0] == tmp_path / "global_step_100"


@pytest.mark.parametrize(
    ("tracker", "warning"),
    [(None, "is missing"), ("", "is empty"), ("30", "names global_step_30"), ("ten\n", "instead of a step")],
)
def test_invalid_tracker_falls_back_to_newest_with_warning(tracker: str | None, warning: str, tmp_path: Path) -> None:
    commit(tmp_path, 10)
    newest = commit(tmp_path, 20)
    (tmp_path / TRACKER).unlink() if tracker is None else (tmp_path / TRACKER).write_text(tracker)
    found, warnings = find(tmp_path)
    assert found == newest
    assert len(warnings) == 1
    assert warning in warnings[0]


def test_verl_restarts_or_crashes_on_invalid_tracker(tmp_path: Path) -> None:
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    commit(tmp_path, 10)
    (tmp_path / TRACKER).write_text("30")
    assert find_latest_ckpt_path(str(tmp_path)) is None  # fault 6: silently from step 0
    (tmp_path / TRACKER).write_text("")
    with pytest.raises(ValueError, match="invalid literal"):
        find_latest_ckpt_path(str(tmp_path))


def break_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"step": 20')


def cut_file(checkpoint: Path) -> None:
    (checkpoint / "model.pt").write_text("cut")


@pytest.mark.parametrize(
    ("damage", "warning"),
    [
        (lambda path: (path / "manifest.json").unlink(), "never completed"),
        (break_manifest, "cannot be read"),
        (cut_file, "model.pt has 3 bytes instead of"),
        (lambda path: (path / "model.pt").unlink(), "model.pt is missing"),
    ],
)
def test_damaged_newest_checkpoint_falls_back_to_previous(damage: object, warning: str, tmp_path: Path) -> None:
    older, newest = commit(tmp_path, 10), commit(tmp_path, 20)
    damage(newest)
    found, warnings = find(tmp_path)
    assert found == older
    assert warning in warnings[0]
    with pytest.raises(UserError, match="cannot be resumed"):
        find(tmp_path, path=str(newest))
    damage(older)
    with pytest.raises(UserError, match="none is complete"):
        find(tmp_path)


def stale(function: Callable[..., Any], failing: Path) -> Callable[..., Any]:
    """The function, which raises ESTALE for a path, as NFS does."""

    def read(path: Path, *arguments: Any, **keywords: Any) -> Any:
        if path == failing:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return function(path, *arguments, **keywords)

    return read


@pytest.fixture
def run_of_two(tmp_path: Path) -> Path:
    """Checkpoints 10 and 20; the tracker still names 10, as after a crash in the save of step 20."""
    commit(tmp_path, 10)
    newest = commit(tmp_path, 20)
    (tmp_path / TRACKER).write_text("10")
    time_of_save = Manifest.read(newest).time
    os.utime(tmp_path / TRACKER, (time_of_save - 5, time_of_save - 5))
    return tmp_path


@pytest.mark.parametrize("name", ["global_step_20/manifest.json", "global_step_20/model.pt", TRACKER])
def test_unreadable_file_is_not_damage(name: str, run_of_two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for function in ("stat", "read_bytes"):
            patch.setattr(Path, function, stale(getattr(Path, function), run_of_two / name))
        with pytest.raises(TransientError, match="cannot be read .*Stale file handle"):
            find(run_of_two)
        if name != TRACKER:
            with pytest.raises(TransientError, match="global_step_20 may be intact"):
                newest_export(run_of_two, 1)
    assert find(run_of_two)[0] == run_of_two / "global_step_20"


@pytest.mark.parametrize("name", ["manifest.json", "model.pt"])
def test_commands_show_unreadable_checkpoint(name: str, run_of_two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for function in ("stat", "read_bytes"):
        monkeypatch.setattr(Path, function, stale(getattr(Path, function), run_of_two / "global_step_20" / name))
    assert "cannot be read (Stale file handle)" in checkpoint_command("ls", run_of_two)
    assert "cannot be read (Stale file handle)" in checkpoint_command("verify", run_of_two, code=1)
    checkpoint_command("prune", run_of_two, "--yes", code=1)


@pytest.mark.usefixtures("one_rank")
def test_unreadable_file_is_retried_and_then_fails_start(run_of_two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(
        run_dir=run_of_two, resume_mode="auto", resume_from_path=None, checkpoint=CheckpointConfig()
    )
    digest, newest = manifest.file_digest, run_of_two / "global_step_20"
    failing = stale(digest, newest / "model.pt")
    monkeypatch.setattr(manifest, "file_digest", failing)
    monkeypatch.setattr(resume, "PAUSES_S", (0, 0))
    with pytest.raises(TransientError, match="model.pt cannot be read"):
        agree_on_checkpoint(config, "")
    monkeypatch.setattr(resume.time, "sleep", lambda seconds: monkeypatch.setattr(manifest, "file_digest", digest))
    assert agree_on_checkpoint(config, "") == newest


@pytest.mark.usefixtures("one_rank")
def test_unreadable_manifest_is_read_again_by_each_rank(run_of_two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes, newest = Path.read_bytes, run_of_two / "global_step_20"
    monkeypatch.setattr(Path, "read_bytes", stale(read_bytes, newest / "manifest.json"))
    monkeypatch.setattr(resume.time, "sleep", lambda seconds: monkeypatch.setattr(Path, "read_bytes", read_bytes))
    assert verify_on_all_ranks(newest) == {}


def test_transient_error_exits_with_code_of_crash() -> None:
    with pytest.raises(SystemExit) as exited, exit_on_user_error():
        raise TransientError("it cannot be read")
    assert exited.value.code == 1


def test_resume_modes_select_expected_checkpoint(tmp_path: Path) -> None:
    assert find(tmp_path / "nothing") == (None, [])
    older, _ = commit(tmp_path, 10), commit(tmp_path, 20)
    assert find(tmp_path, "disable") == (None, [])
    assert find(tmp_path, "resume_path", str(older)) == (older, [])
    elsewhere = commit(tmp_path / "other", 15)
    assert find(tmp_path, "auto", str(elsewhere))[0] == tmp_path / "global_step_20"  # the run has continued since
    assert find(tmp_path, "resume_path", str(elsewhere))[0] == elsewhere


def kept(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step_")) for path in list_checkpoints(run_dir))


def test_rotation_keeps_newest_steps_and_protected_checkpoints(tmp_path: Path) -> None:
    for step in (5, 10, 9, 100, 20):  # 100 sorts before 20 and 9 as text
        commit(tmp_path, step)
    (tmp_path / "global_step_5" / "keep").touch()
    (tmp_path / "best_checkpoint.json").write_text('{"step": 9}')
    (tmp_path / "global_step_30").mkdir()  # not complete, so neither counted nor removed
    (tmp_path / "global_step_40.tmp").mkdir()
    (tmp_path / "global_step_41.removing").mkdir()
    removed = rotate(tmp_path, *retention(2), 100, pytest.fail)
    assert [path.name for path in removed] == ["global_step_10"]
    assert kept(tmp_path) == [5, 9, 20, 30, 100]
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob("*.removing"))
    assert rotate(tmp_path, *retention(None), 100, pytest.fail) == []


def test_unreadable_best_record_stops_rotation(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, step)
    (tmp_path / "best_checkpoint.json").write_text("{")
    warnings: list[str] = []
    assert rotate(tmp_path, *retention(1), 3, warnings.append) == []
    assert "no checkpoint is removed" in warnings[0]
    assert kept(tmp_path) == [1, 2, 3]


def test_rotation_after_restart_keeps_latest_save(tmp_path: Path) -> None:
    for step in (400, 600, 750):
        commit(tmp_path, step)
    commit(tmp_path, 200)
    rotate(tmp_path, *retention(3), 200, pytest.fail)
    assert kept(tmp_path) == [200, 600, 750]
    assert find(tmp_path) == (tmp_path / "global_step_200", [])
