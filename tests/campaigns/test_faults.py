"""SIGKILL of one rank and of all at each point of the checkpoint protocol, and of any process at random moments."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.helpers import faults
from tests.helpers.commands import SFTRun
from tests.helpers.faults import ANY


@pytest.mark.parametrize(
    ("name", "victims", "resumes_from"),
    [
        ("before staging", ANY, 2),
        ("before staging", (0, 1), 2),
        ("shard writes", ANY, 2),
        ("shard writes", (0, 1), 2),
        ("export", ANY, 2),
        ("export", (0, 1), 2),
        ("before the manifest", (0,), 2),
        ("before the manifest", (1,), 4),  # rank 0 has all it needs to complete the commit
        ("before the manifest", (0, 1), 2),
        ("before the rename", (0, 1), 2),
        ("before the tracker", (0,), 4),
        ("before the tracker", (0, 1), 4),
        ("rotation", (0,), 4),
        ("rotation", (0, 1), 4),
    ],
    ids=str,
)
def test_kill_during_save_loses_nothing(
    name: str, victims: tuple[int, ...], resumes_from: int, sft_run: SFTRun, quickstart: Path, tmp_path: Path
) -> None:
    faults.assert_killed_run_resumes(name, victims, resumes_from, sft_run, quickstart, tmp_path)


@pytest.mark.parametrize(
    ("name", "victims", "resumes_from"),
    [
        ("staging", ANY, 2),
        ("shard writes", (0, 1), 2),
        ("export", ANY, 2),
        ("before the tracker", (0, 1), 4),
    ],
    ids=str,
)
def test_kill_during_background_save_loses_nothing(
    name: str, victims: tuple[int, ...], resumes_from: int, sft_run: SFTRun, quickstart: Path, tmp_path: Path
) -> None:
    background = "trainer.checkpoint.async_save=true"
    faults.assert_killed_run_resumes(name, victims, resumes_from, sft_run, quickstart, tmp_path, background)


@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_random_moments_lose_nothing(seed: int, sft_run: SFTRun, quickstart: Path, tmp_path: Path) -> None:
    """Ten kills, in as many runs as needed."""
    chance, num_kills, num_runs = random.Random(seed), 0, 0
    while num_kills < 10:
        directory, num_runs = tmp_path / str(num_runs), num_runs + 1
        num_kills += faults.assert_random_kills_lose_nothing(chance, 10 - num_kills, sft_run, quickstart, directory)
