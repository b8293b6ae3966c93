"""A save that the file system refuses: one sentence, all earlier checkpoints intact, and the run goes on from them."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.commands import Hold, Run, assert_goes_on

KEEP_ONE = "trainer.max_ckpt_to_keep=1"
SAVING_IN = [pytest.param(False, id="foreground"), pytest.param(True, id="background")]
BEFORE_THE_SAVE = Hold("verl_ext.checkpoint.manager", "CheckpointManager._make_room", "global_step_4")
IN_A_SHARD = Hold("verl_ext.checkpoint.writing", "DigestingFile.write", "global_step_4.tmp/optim", rank=1, call=5)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk for one checkpoint (27 MB) and not for two; `resize` makes it larger."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def resize(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Take all the space there is; the file that has it."""
    path = disk / "filler"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    return path


def without_roots_power() -> tuple[str, ...]:
    """Words before a command that make read-only directories count for root too."""
    if os.geteuid() != 0:
        return ()
    words = ("setpriv", "--bounding-set=-dac_override", "--")
    if subprocess.run([*words, "true"], capture_output=True).returncode != 0:
        pytest.skip("root may write into read-only directories, and setpriv cannot take that from it here")
    return words


def assert_refused(result: subprocess.CompletedProcess[str], run: Run, *words: str) -> None:
    """The save of step 4 failed with one sentence that holds `words`; step 2 is as it was."""
    assert result.returncode == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    for word in (*words, "every earlier checkpoint is as it was"):
        assert word in errors[0]
    assert "Traceback" not in result.stdout + result.stderr
    assert run.names() == {"2"}
    assert run.tracker() == "2"


@pytest.mark.parametrize("in_background", SAVING_IN)
def test_a_save_that_cannot_fit_is_not_begun(
    in_background: bool, small_disk: Path, quickstart: Path, tmp_path: Path
) -> None:
    run = Run(quickstart, small_disk / "run", KEEP_ONE, f"trainer.checkpoint.async_save={in_background}")
    result = run.start()
    assert_refused(result, run, "global_step_4 cannot be saved: it takes 0.02 GiB", "0.01 GiB free")
    assert "the next checkpoint takes about 0.03 GiB" in result.stderr  # said one save ahead
    resize(small_disk, "64m")
    assert_goes_on(run, quickstart, 2)


@pytest.mark.parametrize("in_background", SAVING_IN)
def test_a_disk_that_fills_up_in_the_middle_of_a_shard(
    in_background: bool, small_disk: Path, quickstart: Path, tmp_path: Path
) -> None:
    resize(small_disk, "64m")
    run = Run(quickstart, small_disk / "run", KEEP_ONE, f"trainer.checkpoint.async_save={in_background}")
    with run.held(IN_A_SHARD, tmp_path) as held:
        assert run.names() == {"2", "4.tmp"}
        filler = fill(small_disk)
        result = held.release()
    assert_refused(result, run, "global_step_4.tmp/", "No space left on device")
    filler.unlink()
    assert_goes_on(run, quickstart, 2)


def test_a_file_that_may_not_grow(quickstart: Path, tmp_path: Path) -> None:
    run = Run(quickstart, tmp_path / "run")
    with run.held(IN_A_SHARD, tmp_path) as held:
        rank = held.ranks()[IN_A_SHARD.rank]
        rank.rlimit(psutil.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        result = held.release()
    assert_refused(result, run, "global_step_4.tmp/optim_world_size_2_rank_1.pt: File too large")
    assert run.attempts()[0]["exit_reason"] in result.stderr
    assert_goes_on(run, quickstart, 2)


def test_a_run_directory_that_becomes_read_only(quickstart: Path, tmp_path: Path) -> None:
    run = Run(quickstart, tmp_path / "run", prefix=without_roots_power())
    with run.held(BEFORE_THE_SAVE, tmp_path) as held:
        run.run_dir.chmod(0o555)
        try:
            result = held.release()
        finally:
            run.run_dir.chmod(0o755)
    assert_refused(result, run, "global_step_4.tmp", "Permission denied")
    assert_goes_on(run, quickstart, 2)


def test_a_read_only_run_directory_is_refused_before_any_rank_starts(quickstart: Path, tmp_path: Path) -> None:
    run = Run(quickstart, tmp_path / "run", prefix=without_roots_power())
    run.run_dir.mkdir(mode=0o555)
    result = run.start()
    assert result.returncode == 2, result.stderr
    assert f"error: the run directory {run.run_dir} is not writable (Permission denied)" in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(run.run_dir.iterdir()) == []
