"""Every metric has its recorded name and unit; what a run logs under these names is in test_pins_runs.py.

`PINS_WRITE=1 bash tests/run.sh unit tests/unit/test_pins_metrics.py` records them again, and fails.
"""

from __future__ import annotations

import re

from tests.helpers.pins import check_pin, metrics_page


def test_the_names_and_units_of_all_metrics() -> None:
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \|", metrics_page(), re.M)
    assert len(rows) == len(dict(rows)), "a metric has two rows"
    check_pin("metrics.json", dict(rows))
