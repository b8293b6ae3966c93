"""Campaign: the monitor on a run of a whole day."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.monitor import assert_update_cost_is_flat


def test_update_cost_is_flat_over_a_day(tmp_path: Path) -> None:
    """Ten steps per second."""
    assert_update_cost_is_flat(tmp_path, num_parts=24, steps_per_part=36_000)
