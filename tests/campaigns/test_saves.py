"""Failing saves and stop requests in the combinations that the integration tests leave out."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import faults
from tests.helpers.commands import SFTRun


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with faults.small_disk(tmp_path / "disk") as disk:
        yield disk


def test_too_large_background_save_does_not_begin(small_disk: Path, sft_run: SFTRun, quickstart: Path) -> None:
    faults.assert_too_large_save_does_not_begin(True, small_disk, sft_run, quickstart)


def test_full_disk_keeps_earlier_checkpoint(
    small_disk: Path, sft_run: SFTRun, quickstart: Path, tmp_path: Path
) -> None:
    faults.assert_full_disk_keeps_earlier_checkpoint(False, small_disk, sft_run, quickstart, tmp_path)


def test_file_size_limit_fails_save(sft_run: SFTRun, quickstart: Path, tmp_path: Path) -> None:
    faults.assert_file_size_limit_fails_save(sft_run, quickstart, tmp_path)


@pytest.mark.parametrize(
    ("number", "receiver", "in_background"),
    [
        (signal.SIGTERM, "launcher", False),
        (signal.SIGINT, "launcher", True),
        (signal.SIGTERM, "rank 0", False),
    ],
)
def test_stop_loses_no_step(
    number: signal.Signals, receiver: str, in_background: bool, sft_run: SFTRun, quickstart: Path, tmp_path: Path
) -> None:
    override = f"trainer.checkpoint.async_save={in_background}"
    faults.assert_stop_loses_no_step(number, receiver, override, sft_run, quickstart, tmp_path)
