"""Checkpoint rotation, leases, digests and the run lock, on plain files with real processes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any
from unittest.mock import Mock

import pytest

from eval_pipeline.checkpoints import EvalCheckpoint, lease_checkpoint
from tests.helpers import ROOT
from tests.helpers.checkpoints import NAMES, OPTIMIZER, kept, retention, save
from tests.helpers.processes import wait_until
from verl_ext.checkpoint.config import CheckpointConfig
from verl_ext.checkpoint.inspection import read_retention
from verl_ext.checkpoint.lease import LIFETIME_S, hold_lease, lease_holders
from verl_ext.checkpoint.manifest import Manifest, complete_checkpoints, damaged_files, why_incomplete
from verl_ext.checkpoint.retention import apply_plan, plan_rotation, reasons_to_keep, remove_tree, rotate
from verl_ext.config.schema import to_yaml
from verl_ext.errors import UserError
from verl_ext.files import hold_run_lock
from verl_ext.processes import boot_id, pid_namespace
from verl_ext.trainer.config import TrainerConfig


def reasons(run_dir: Path, max_to_keep: int | None, config: CheckpointConfig, step: int) -> dict[int, list[str]]:
    found = reasons_to_keep(run_dir, max_to_keep, config, step)
    return {int(path.name.removeprefix("global_step_")): why for path, why in found.items()}


def start_python(code: str) -> subprocess.Popen[str]:
    """Start a process and wait for its first line of output."""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline()
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_retention_reasons_are_listed_newest_first(tmp_path: Path) -> None:
    for step, loss in ((1, 0.5), (2, 3.0), (3, 2.0), (4, 1.0), (5, 4.0), (6, 5.0)):
        save(tmp_path, step, val=loss)
    (tmp_path / "global_step_2" / "keep").touch()
    (tmp_path / "best_checkpoint.json").write_text('{"step": 3}')
    with hold_lease(tmp_path / "global_step_5"):
        found = reasons(tmp_path, *retention(1, keep_best=2), 6)
    assert list(found) == [6, 5, 4, 3, 2, 1]
    assert found == {
        6: ["the newest"],
        5: [f"leased by process {os.getpid()} on {socket.gethostname()}"],
        4: ["one of the 2 best by val/loss"],
        3: ["selected in best_checkpoint.json"],
        2: ["protected by its `keep` file"],
        1: ["one of the 2 best by val/loss"],
    }
    rotate(tmp_path, *retention(1, keep_best=2), 6, pytest.fail)
    assert kept(tmp_path) == [1, 2, 3, 4, 6]  # the lease has ended


@pytest.mark.parametrize(("mode", "expected"), [("min", [3, 6]), ("max", [5, 6])])
def test_best_needs_finite_metric_and_ties_keep_newer(tmp_path: Path, mode: str, expected: list[int]) -> None:
    diverged = float("-inf" if mode == "min" else "inf")
    for step, loss in ((1, 1.0), (2, diverged), (3, 1.0), (4, 9.0), (5, 9.0)):
        save(tmp_path, step, val=loss)
    save(tmp_path, 6, train=0.0)
    rotate(tmp_path, *retention(1, keep_best=1, best_mode=mode), 6, pytest.fail)
    assert kept(tmp_path) == expected


def test_newest_checkpoint_counts_as_best(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, val=4.0 - step)
    rotate(tmp_path, *retention(1, keep_best=1), 3, pytest.fail)
    assert kept(tmp_path) == [3]


def test_best_of_abandoned_branch_does_not_replace_best_of_run(tmp_path: Path) -> None:
    save(tmp_path, 200, val=0.5)  # before a restart with resume_mode=disable
    save(tmp_path, 50)
    rotate(tmp_path, *retention(1, keep_best=1), 50, pytest.fail)
    assert kept(tmp_path) == [50, 200]  # the run itself has no validation yet
    for step, loss in ((100, 0.6), (150, 0.9)):
        save(tmp_path, step, val=loss)
        rotate(tmp_path, *retention(1, keep_best=1), step, pytest.fail)
    assert kept(tmp_path) == [100, 150]


def test_retention_is_read_from_configuration_and_validated(tmp_path: Path) -> None:
    assert read_retention(tmp_path) == retention(None)
    section = CheckpointConfig(keep_best=2, best_metric="eval/x", best_mode="max", drop_optimizer_of_best=True)
    trainer = to_yaml(TrainerConfig(max_ckpt_to_keep=3, checkpoint=replace(section, load_contents=["model"])))
    (tmp_path / "config.yaml").write_text("trainer:\n" + indent(trainer.replace("${", "{"), "  "))
    assert read_retention(tmp_path) == (3, section)
    for values, message in [
        ("{max_ckpt_to_keep: 0}", "trainer.max_ckpt_to_keep is 0; it must be an integer of at least 1"),
        ("{max_ckpt_to_keep: two}", "trainer.max_ckpt_to_keep is 'two'"),
        (
            "{checkpoint: {keep_best: -1}}",
            "checkpoint.keep_best is -1; it must be an integer of at least 0",
        ),
        ("{checkpoint: {best_mode: low}}", "best_mode is 'low'; it must be min or max"),
        ("{checkpoint: 3}", "checkpoint is 3"),
    ]:
        (tmp_path / "config.yaml").write_text(f"trainer: {values}\n")
        with pytest.raises(UserError, match=message) as refused:
            read_retention(tmp_path)
        assert "config.yaml" in str(refused.value)


def test_optimizer_is_dropped_only_if_kept_as_best_alone(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, val=float(step))
    (tmp_path / "global_step_2" / "keep").touch()
    rotate(tmp_path, *retention(1, keep_best=2), 4, pytest.fail)
    assert all((tmp_path / "global_step_1" / name).exists() for name in OPTIMIZER)
    rotate(tmp_path, *retention(1, keep_best=2, drop_optimizer_of_best=True), 4, pytest.fail)
    assert kept(tmp_path) == [1, 2, 4]
    best = tmp_path / "global_step_1"
    assert why_incomplete(best) is None and damaged_files(best) == {}
    assert Manifest.read(best).dropped == ("optimizer",)
    assert not list(best.glob("optim_*"))
    for step in (2, 4):
        assert Manifest.read(tmp_path / f"global_step_{step}").dropped == ()
        assert all((tmp_path / f"global_step_{step}" / name).exists() for name in OPTIMIZER)


def test_next_rotation_removes_leftover_optimizer_files(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, val=float(step))
    best = tmp_path / "global_step_1"
    settings = retention(1, keep_best=1, drop_optimizer_of_best=True)
    rotate(tmp_path, *settings, 2, pytest.fail)
    (best / OPTIMIZER[0]).write_text("was not deleted yet")
    (best / "keep").touch()  # no longer kept only as the best, but still complete without its optimizer
    rotate(tmp_path, *settings, 2, pytest.fail)
    assert not list(best.glob("optim_*"))
    assert Manifest.read(best).dropped == ("optimizer",)


def test_checkpoint_missing_after_planning_is_a_warning(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, val=float(step))
    plan = plan_rotation(tmp_path, *retention(1, keep_best=1, drop_optimizer_of_best=True), 2)
    assert plan.strip == [tmp_path / "global_step_1"]
    remove_tree(tmp_path / "global_step_1")
    warnings: list[str] = []
    assert apply_plan(plan, warnings.append) == []
    assert "it has no manifest.json" in warnings[0] and kept(tmp_path) == [2]


def test_failed_removal_warns_and_others_are_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "global_step_1.removing").write_text("a file where the directory is to be renamed to")
    warnings: list[str] = []
    removed = rotate(tmp_path, *retention(1), 3, warnings.append)
    assert [path.name for path in removed] == ["global_step_2"]
    assert kept(tmp_path) == [1, 3]
    assert any("global_step_1 could not be cleaned up" in warning for warning in warnings)


def test_interrupted_removal_is_finished(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "global_step_1.removing").mkdir()
    (tmp_path / "global_step_1.removing" / "model.pt").touch()
    assert [path.name for path in rotate(tmp_path, *retention(1), 2, pytest.fail)] == ["global_step_1"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["global_step_2"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"step": "9"}', '{"step": null}'])
def test_unreadable_best_record_keeps_all_checkpoints(tmp_path: Path, text: str) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, val=float(step))
    (tmp_path / "best_checkpoint.json").write_text(text)
    warnings: list[str] = []
    assert rotate(tmp_path, *retention(1, keep_best=1, drop_optimizer_of_best=True), 3, warnings.append) == []
    assert kept(tmp_path) == [1, 2, 3]
    assert "repair or delete it" in warnings[0]
    assert Manifest.read(tmp_path / "global_step_1").dropped == ()


def write_lease(checkpoint: Path, **changes: Any) -> Path:
    lease = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "expires": time.time() + 1000}
    path = checkpoint / "lease.other.1.json"
    path.write_text(json.dumps({**lease, **changes}))
    return path


def test_lease_file_is_renewed_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_ext.checkpoint.lease.LIFETIME_S", 0.1)
    checkpoint = save(tmp_path, 1)
    with hold_lease(checkpoint):
        (path,) = checkpoint.glob("lease.*.json")
        assert path.name.startswith(f"lease.{socket.gethostname()}.{os.getpid()}.")
        first = json.loads(path.read_text())
        assert {"host", "boot_id", "pid_namespace", "pid", "time", "expires"} == first.keys()
        wait_until(lambda: json.loads(path.read_text())["expires"] > first["expires"])
    assert not list(checkpoint.glob("lease*"))
    assert why_incomplete(checkpoint) is None


def test_end_of_lease_keeps_lease_of_same_host_name_and_process_id(tmp_path: Path) -> None:
    """Two containers can have both in common."""
    checkpoint, other = save(tmp_path, 1), ExitStack()
    with hold_lease(checkpoint):
        other.enter_context(hold_lease(checkpoint))
        assert len(list(checkpoint.glob("lease.*.json"))) == 2
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    assert lease_holders(checkpoint) == [holder]
    other.close()
    assert lease_holders(checkpoint) == []


def test_reader_without_lease_gets_warning_and_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse = Mock(side_effect=OSError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr("verl_ext.checkpoint.lease.replace_file", refuse)
    with pytest.raises(UserError, match="the reader's error") as caught, hold_lease(save(tmp_path, 1)):
        raise UserError("the reader's error")
    assert caught.value.__context__ is None
    assert "a running training job may remove it" in capsys.readouterr().err


def test_lease_of_killed_local_process_is_ignored(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    checkpoint = tmp_path / "global_step_1"
    process = start_python(
        "import sys, time\nfrom pathlib import Path\nfrom verl_ext.checkpoint.lease import hold_lease\n"
        f"with hold_lease(Path({str(checkpoint)!r})):\n    print('held', flush=True)\n    time.sleep(1000)"
    )
    try:
        assert lease_holders(checkpoint) == [f"process {process.pid} on {socket.gethostname()}"]
        assert rotate(tmp_path, *retention(1), 2, pytest.fail) == []
    finally:
        kill(process)
    assert list(checkpoint.glob("lease.*.json"))
    assert lease_holders(checkpoint) == []
    assert rotate(tmp_path, *retention(1), 2, pytest.fail) == [checkpoint]


def test_lease_taken_after_planning_is_respected(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    plan = plan_rotation(tmp_path, *retention(1), 3)
    warnings: list[str] = []
    with hold_lease(tmp_path / "global_step_2"):
        assert apply_plan(plan, warnings.append) == [tmp_path / "global_step_1"]
    assert kept(tmp_path) == [2, 3]
    assert f"is kept for now, because leased by process {os.getpid()}" in warnings[0]


def test_lease_is_live_until_expired_or_holder_dead(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1)
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    write_lease(checkpoint)
    assert lease_holders(checkpoint) == [f"process {os.getpid()} on {socket.gethostname()}"]
    write_lease(checkpoint, expires=time.time() - 1)
    assert lease_holders(checkpoint) == []
    write_lease(checkpoint, pid=int(dead.stdout))
    assert lease_holders(checkpoint) == []
    write_lease(checkpoint, pid=int(dead.stdout), host="another")  # whose processes cannot be seen from here
    assert lease_holders(checkpoint) == [f"process {int(dead.stdout)} on another"]
    write_lease(checkpoint, pid=int(dead.stdout), pid_namespace=1)  # a container that has this machine's name
    assert len(lease_holders(checkpoint)) == 1
    write_lease(checkpoint, pid=int(dead.stdout), pid_namespace=pid_namespace(), boot_id="another")  # a cloned machine
    assert len(lease_holders(checkpoint)) == 1
    write_lease(checkpoint, pid=int(dead.stdout), pid_namespace=pid_namespace(), boot_id=boot_id())
    assert lease_holders(checkpoint) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"host": "h", "pid": 1, "expires": Infinity}'])
def test_malformed_lease_counts_until_old(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, 1) / "lease.other.1.json"
    path.write_text(text)
    assert lease_holders(path.parent) == ["lease.other.1.json, which cannot be read"]
    old = time.time() - LIFETIME_S - 1
    os.utime(path, (old, old))
    assert lease_holders(path.parent) == []


def test_evaluation_takes_lease_and_continues_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 1)
    checkpoint = EvalCheckpoint(path, path / "huggingface", run_dir=tmp_path, step=1)
    with lease_checkpoint(checkpoint):
        assert len(lease_holders(path)) == 1
    assert lease_holders(path) == []
    with lease_checkpoint(replace(checkpoint, run_dir=None)):
        assert lease_holders(path) == []
    # root can write into read-only directories, but not a file over a directory
    monkeypatch.setattr("verl_ext.checkpoint.lease.token_hex", lambda length: "00ff00ff")
    (path / f"lease.{socket.gethostname()}.{os.getpid()}.00ff00ff.json.tmp").mkdir()
    with lease_checkpoint(checkpoint):
        assert lease_holders(path) == []
    assert f"cannot protect {path} (Is a directory); a running training job may remove it" in capsys.readouterr().err
    with pytest.raises(UserError, match="has just been removed"):
        with lease_checkpoint(replace(checkpoint, path=tmp_path / "global_step_2")):
            pass


def test_unreadable_checkpoint_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a directory of another user; the tests may run as root, who can read everything."""
    good, unreadable = save(tmp_path, 1), save(tmp_path, 2)
    stat = Path.stat

    def refusing(path: Path, **options: bool) -> os.stat_result:
        if unreadable in path.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    def read_bytes(path: Path) -> bytes:
        refusing(path)
        return path.open("rb").read()

    monkeypatch.setattr(Path, "stat", refusing)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert [*complete_checkpoints(tmp_path)] == [good]
    assert "Permission denied" in str(why_incomplete(unreadable))


@pytest.mark.parametrize("content", ["[]", "5", '{"files": 5}', '{"files": ["a"]}'])
def test_other_json_is_not_a_manifest(content: str, tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "manifest.json").write_text(content)
    assert why_incomplete(path) == "its manifest.json cannot be read (it is not a manifest)"


def test_damaged_files_are_reported_with_reason(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1)
    read: list[int] = []
    assert damaged_files(checkpoint, progress=read.append) == {}
    assert sum(read) == Manifest.read(checkpoint).num_bytes
    model, config, first, second = (checkpoint / name for name in NAMES)
    flipped = bytearray(model.read_bytes())
    flipped[0] ^= 1
    model.write_bytes(flipped)
    config.write_text("short")
    first.unlink()
    damaged = damaged_files(checkpoint)
    assert set(damaged) == set(NAMES[:3])
    assert damaged[NAMES[0]].startswith("has the digest ")
    assert damaged[NAMES[1]].startswith("has 5 bytes instead of ")
    assert damaged[NAMES[2]] == "is missing"
    assert damaged_files(checkpoint, [NAMES[3], NAMES[2], "other"]) == {
        NAMES[2]: "is missing",
        "other": "is not in the manifest",
    }
    (checkpoint / "export_plan.json").touch()  # without it verl might have written the rest
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(ValueError, match="never completed"):
        damaged_files(checkpoint)


def move_and_link(checkpoint: Path, directory: Path) -> Path:
    """Move a checkpoint to another directory, leave a link to it, and return its new path."""
    directory.mkdir(exist_ok=True)
    moved = checkpoint.rename(directory / checkpoint.name)
    checkpoint.symlink_to(moved)
    return moved


def test_rotation_removes_only_link_to_moved_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    checkpoints = [save(run_dir, step) for step in (1, 2)]
    moved = move_and_link(checkpoints[0], tmp_path / "disk")
    assert rotate(run_dir, *retention(1), 2, pytest.fail) == checkpoints[:1]
    assert why_incomplete(moved) is None
    assert [path.name for path in run_dir.glob("global_step_*")] == ["global_step_2"]


def test_checkpoint_is_saved_in_place_of_link(tmp_path: Path) -> None:
    """The link may also be broken; the rotation after the save deletes it."""
    run_dir, disk = tmp_path / "run", tmp_path / "disk"
    for is_broken in (False, True, False):
        moved = move_and_link(save(run_dir, 1), disk)
        if is_broken:
            shutil.rmtree(moved)
        assert not save(run_dir, 1).is_symlink() and why_incomplete(run_dir / "global_step_1") is None
        assert rotate(run_dir, *retention(1), 1, pytest.fail) == []
        assert [path.name for path in run_dir.glob("global_*")] == ["global_step_1"]
        shutil.rmtree(moved, ignore_errors=True)


def test_run_lock_names_holder_and_is_released_when_killed(tmp_path: Path) -> None:
    process = start_python(
        "import time\nfrom pathlib import Path\nfrom verl_ext.files import hold_run_lock\n"
        f"with hold_run_lock(Path({str(tmp_path)!r})):\n    print('held', flush=True)\n    time.sleep(1000)"
    )
    try:
        with pytest.raises(UserError, match=f"in use by process {process.pid} on "):
            with hold_run_lock(tmp_path):
                pass
    finally:
        kill(process)
    assert str(process.pid) in (tmp_path / "run.lock").read_text()  # stale
    with hold_run_lock(tmp_path):
        assert (tmp_path / "run.lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    assert (tmp_path / "run.lock").read_text() == ""
    with pytest.raises(UserError, match=r"cannot write .*run\.lock"):
        with hold_run_lock(tmp_path / "none"):
            pass


@pytest.mark.parametrize("module", ["manifest", "lease", "retention", "resume"])
def test_light_modules_import_only_standard_library(module: str) -> None:
    code = (
        f"import sys, verl_ext.checkpoint.{module}\n"
        "ours = {name for name in sys.modules if name.partition('.')[0] not in sys.stdlib_module_names}\n"
        "print(sorted(name for name in ours if name.partition('.')[0] not in ('verl_ext', '__main__')))"
    )
    # -S: without the start-up hooks of installed packages
    result = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
