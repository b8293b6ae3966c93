"""Every metric has its recorded name and unit; what a run logs under these names is in test_pins_runs.py.

`PINS_WRITE=1 bash tests/run.sh unit tests/unit/test_pins_metrics.py` records them again, and fails.
"""

from __future__ import annotations

from tests.helpers.pins import check_pin, metric_units


def test_metric_names_and_units_match_record() -> None:
    rows = metric_units()
    assert len(rows) == len(dict(rows)), "a metric has two entries"
    check_pin("metrics.json", dict(rows))
