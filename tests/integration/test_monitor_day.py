"""An hour of ten steps per second: neither the page's memory nor the work of its queries grows with the run."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.monitor import assert_update_cost_is_flat


def test_update_cost_is_flat_over_an_hour(tmp_path: Path) -> None:
    assert_update_cost_is_flat(tmp_path, num_parts=8, steps_per_part=4500)
