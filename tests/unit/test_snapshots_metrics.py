"""Every metric has its recorded name and unit; what a run logs under these names is in test_snapshots_runs.py.

`SNAPSHOT_UPDATE=1 bash tests/run.sh unit tests/unit/test_snapshots_metrics.py` records them again, and fails.
"""

from __future__ import annotations

from tests.helpers.snapshots import check_snapshot, metric_units


def test_metric_names_and_units_match_record() -> None:
    rows = metric_units()
    assert len(rows) == len(dict(rows)), "a metric has two entries"
    check_snapshot("metrics.json", dict(rows))
