"""SIGKILL of ranks at points of the checkpoint protocol; the same command then resumes without any loss.

`tests/campaigns/test_faults.py` covers every point, and kills at random moments.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import faults
from tests.helpers.commands import SFTRun


@pytest.mark.parametrize(
    ("name", "victims", "resumes_from"),
    [
        ("shard writes", (0, 1), 2),
        ("before the manifest", (1,), 4),  # rank 0 has all it needs to complete the commit
        ("before the rename", (0, 1), 2),
        ("before the tracker", (0,), 4),
        ("rotation", (0,), 4),
    ],
    ids=str,
)
def test_kill_during_save_loses_nothing(
    name: str, victims: tuple[int, ...], resumes_from: int, sft_run: SFTRun, quickstart: Path, tmp_path: Path
) -> None:
    faults.assert_killed_run_resumes(name, victims, resumes_from, sft_run, quickstart, tmp_path)


def test_kill_during_background_export_loses_nothing(sft_run: SFTRun, quickstart: Path, tmp_path: Path) -> None:
    background = "trainer.checkpoint.async_save=true"
    faults.assert_killed_run_resumes("export", faults.ANY, 2, sft_run, quickstart, tmp_path, background, seed=0)
