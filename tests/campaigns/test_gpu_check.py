"""Campaign: every part of the GPU check with tiny models on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_check import is_wrong, parts_of
from tests.helpers import ROOT


def test_tiny_check_passes(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--tiny", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(output.read_text())["parts"]
    assert [part["part"] for part in results] == [part.name for part in parts_of(tiny=True)]
    checks = {part["part"]: [row for row in part["rows"] if row["limit"] is not None] for part in results}
    assert not [row for rows in checks.values() for row in rows if is_wrong(row)]
    without = {"controller"} | {name for name in checks if name.startswith(("SFT", "save"))}
    assert {name for name, rows in checks.items() if not rows} == without
    rates = [row["value"] for part in results for row in part["rows"] if row["name"] == "throughput"]
    assert len(rates) == 2 and min(rates) > 0
