"""verl's tracking starts a new W&B run at every start (fault 10); ours keeps one, in a real offline run of each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers import ROOT

STOCK = """
import wandb
from verl.utils.tracking import Tracking
tracking = Tracking("project", "experiment", ["wandb"])
print("id", wandb.run.id)
"""
OURS = """
import sys
from pathlib import Path
from verl_ext.metrics.wandb_run import open_wandb_run, persistent_run_id
run_dir = Path(sys.argv[1])
run = open_wandb_run(project="p", name="e", directory=run_dir, config={}, run_id=persistent_run_id(run_dir))
print("id", run.id)
run.finish()
"""


def run_id(code: str, tmp_path: Path) -> str:
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=120)
    return result.stdout.split("id ")[1].split()[0]


def test_verl_starts_a_new_run_at_every_start_and_we_do_not(tmp_path: Path) -> None:
    assert run_id(STOCK, tmp_path) != run_id(STOCK, tmp_path)
    assert run_id(OURS, tmp_path) == run_id(OURS, tmp_path)
