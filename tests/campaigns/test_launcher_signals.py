"""A signal to the launcher at every phase of a start, and at fixed and random delays."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.helpers.launchers import PHASES, check_signal_is_not_lost, small_launches

DELAYS = [0, 1.5, 2.5, 3, 3.5]
RANDOM_DELAYS = [round(random.Random(seed).uniform(0, 4), 2) for seed in range(10)]


@pytest.mark.parametrize("phase", PHASES)
def test_signal_at_start_of_phase_is_not_lost(phase: str, tmp_path: Path) -> None:
    with small_launches(tmp_path) as launches:
        check_signal_is_not_lost(launches, phase)


@pytest.mark.parametrize("delay_s", [*DELAYS, *RANDOM_DELAYS])
def test_signal_during_start_is_not_lost(delay_s: float, tmp_path: Path) -> None:
    with small_launches(tmp_path) as launches:
        check_signal_is_not_lost(launches, "waiting", delay_s)
