"""The regression checks read the committed results and report slowdowns, whichever way a ratio points."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import quick
from benchmarks.quick import CHECKS, RegressionCheck, measured, verdict
from verl_ext.errors import UserError


@pytest.mark.parametrize("name", CHECKS)
def test_committed_results_have_finite_ratios(name: str) -> None:
    check = CHECKS[name]
    ratio = check.ratio(json.loads((quick.ROOT / "benchmarks/results" / check.results).read_text()))
    assert math.isfinite(ratio) and ratio > 0


def test_verdict_respects_direction_of_ratio() -> None:
    assert verdict(0.80, 1.0, more_is_better=True) == "SLOWER by 25%"
    assert verdict(1.25, 1.0, more_is_better=False) == "SLOWER by 25%"
    assert verdict(0.90, 1.0, more_is_better=True) == verdict(1.1, 1.0, more_is_better=False) == "as before"
    assert verdict(1.25, 1.0, more_is_better=True) == verdict(0.80, 1.0, more_is_better=False) == "better"


def test_failed_benchmark_is_reported_with_its_error(tmp_path: Path) -> None:
    def check(code: str) -> RegressionCheck:
        return RegressionCheck("", ("-c", code), "x.json", lambda results: results["a"])

    writes = f"import json; json.dump(dict(a=2), open('{tmp_path}/x.json.now', 'w'))"
    assert measured(check(writes), tmp_path) == {"a": 2}
    (tmp_path / "x.json.now").unlink()
    with pytest.raises(UserError, match="no disk"):
        measured(check("raise SystemExit('no disk')"), tmp_path)
    torchrun = "import sys; print('OSError: full\\nFAILED\\n=====', file=sys.stderr); "  # ends with a table and a rule
    with pytest.raises(UserError, match="ended with 1: OSError: full$"):
        measured(check(f"{torchrun}raise SystemExit(1)"), tmp_path)
    with pytest.raises(UserError, match="ended with 3: exit code 3$"):
        measured(check("raise SystemExit(3)"), tmp_path)
    assert measured(check(f"{writes}; raise SystemExit(1)"), tmp_path) == {"a": 2}
