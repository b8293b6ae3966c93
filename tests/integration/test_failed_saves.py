"""A save that the file system refuses: one error message, intact earlier checkpoints, and an exact resume.

`tests/campaigns/test_saves.py` has the other combinations with saving in the background.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import faults
from tests.helpers.commands import Hold, SFTRun, assert_resumes

BEFORE_THE_SAVE = Hold("verl_ext.checkpoint.save", "CheckpointWriter.prepare", "global_step_4")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with faults.small_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def unprivileged() -> tuple[str, ...]:
    """A command prefix that makes directory modes apply to root, too."""
    if os.geteuid() != 0:
        return ()
    words = ("setpriv", "--bounding-set=-dac_override", "--")
    if subprocess.run([*words, "true"], capture_output=True).returncode != 0:
        pytest.skip("root may write into read-only directories, and setpriv cannot take that from it here")
    return words


def test_too_large_save_does_not_begin(small_disk: Path, sft_run: SFTRun, quickstart: Path) -> None:
    faults.assert_too_large_save_does_not_begin(False, small_disk, sft_run, quickstart)


def test_full_disk_keeps_earlier_checkpoint(
    small_disk: Path, sft_run: SFTRun, quickstart: Path, tmp_path: Path
) -> None:
    faults.assert_full_disk_keeps_earlier_checkpoint(True, small_disk, sft_run, quickstart, tmp_path)


def test_run_directory_turning_read_only_fails_save(
    unprivileged: tuple[str, ...], sft_run: SFTRun, quickstart: Path, tmp_path: Path
) -> None:
    run = SFTRun(quickstart, tmp_path / "run", prefix=unprivileged)
    with run.held(BEFORE_THE_SAVE, tmp_path) as held:
        run.run_dir.chmod(0o555)
        try:
            result = held.release()
        finally:
            run.run_dir.chmod(0o755)
    faults.assert_refused(result, run, "global_step_4.tmp", "Permission denied")
    assert_resumes(SFTRun(quickstart, run.run_dir), sft_run, 2)


def test_rejects_read_only_run_directory_before_start(
    unprivileged: tuple[str, ...], quickstart: Path, tmp_path: Path
) -> None:
    run = SFTRun(quickstart, tmp_path / "run", prefix=unprivileged)
    run.run_dir.mkdir(mode=0o555)
    result = run.start()
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert str(run.run_dir) in result.stderr and "permission" in result.stderr
    assert list(run.run_dir.iterdir()) == []
