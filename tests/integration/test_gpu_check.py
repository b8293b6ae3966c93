"""Parts of the GPU check with tiny models on the CPU, as a user types it; a campaign runs all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_check import is_wrong
from tests.helpers import ROOT

PARTS = ("asynchronous save", "GRPO, rows", "SFT tiny, LoRA")


def test_chosen_parts_pass(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--tiny", "--parts", *PARTS, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(output.read_text())["parts"]
    assert sorted(part["part"] for part in results) == sorted(PARTS)
    checks = {part["part"]: [row for row in part["rows"] if row["limit"] is not None] for part in results}
    assert not [row for rows in checks.values() for row in rows if is_wrong(row)]
    assert {name for name, rows in checks.items() if rows} == {"asynchronous save", "GRPO, rows"}
    [rate] = [row["value"] for part in results for row in part["rows"] if row["name"] == "throughput"]
    assert rate > 0
