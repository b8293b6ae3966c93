"""verl's tracking creates a new W&B run at every start (fault 10); ours keeps one. Both use real offline runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

STOCK = """
import wandb
from verl.utils.tracking import Tracking
for start in range(2):
    tracking = Tracking("project", "experiment", ["wandb"])
    print("id", wandb.run.id)
    del tracking  # ends the run
"""
OURS = """
import sys
from pathlib import Path
from verl_ext.metrics.wandb_sink import open_wandb_run, persistent_run_id
run_dir = Path(sys.argv[1])
for start in range(2):
    run = open_wandb_run(project="p", name="e", directory=run_dir, config={}, run_id=persistent_run_id(run_dir))
    print("id", run.id)
    run.finish()
"""


@pytest.mark.parametrize(("code", "num_runs"), [(STOCK, 2), (OURS, 1)], ids=["verl", "ours"])
def test_two_starts_share_one_wandb_run_unlike_verl(code: str, num_runs: int, tmp_path: Path) -> None:
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=300)
    ids = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("id ")]
    assert len(ids) == 2 and len(set(ids)) == num_runs
