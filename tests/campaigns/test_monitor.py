"""Campaign: the monitor on a run of a whole day."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.monitor import assert_update_cost_is_flat


def test_a_day_costs_the_same_as_an_hour(tmp_path: Path) -> None:
    """Ten steps per second."""
    assert_update_cost_is_flat(tmp_path, num_parts=24, steps_per_part=36_000)
