"""An hour of ten steps per second: neither the page's memory nor the work of its queries grows with the run."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.monitor import assert_update_cost_is_flat


def test_an_hour_costs_the_same_as_its_first_minutes(tmp_path: Path) -> None:
    assert_update_cost_is_flat(tmp_path, num_parts=8, steps_per_part=4500)
