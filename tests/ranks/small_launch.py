"""The launcher on small ranks.

`python -m tests.ranks.small_launch RUN_DIR GRACE_S RESTARTS FIRST_PAUSE_S LEAVE_AFTER_S`
"""

from __future__ import annotations

import os
import sys

from verl_ext.launch import outcome, ranks
from verl_ext.launch.__main__ import handle_stop_signals
from verl_ext.launch.run import run_until_finished
from verl_ext.metrics import heartbeat
from verl_ext.trainer.stages import load_config

if __name__ == "__main__":
    run_dir, grace_s, restarts, first_pause_s, leave_after_s = sys.argv[1:]
    ranks.RANK_MODULE, ranks.LEAVE_AFTER_S = "tests.ranks.small_ranks", float(leave_after_s)
    outcome.FIRST_PAUSE_S = float(first_pause_s)
    heartbeat.BEAT_S = 0.1
    words = {
        "trainer.default_local_dir": run_dir,
        "trainer.project_name": "tests",
        "trainer.experiment_name": "small",
        "trainer.resume_mode": os.environ.get("SMALL_RESUME_MODE", "auto"),
        "trainer.preemption.grace_s": grace_s,
        "trainer.checkpoint.save_contents": "[model]",
        "trainer.checkpoint.load_contents": "[model,optimizer,extra]",
        "trainer.total_epochs": "1",
        "model.partial_pretrain": "org/name",
    }
    config = load_config("sft", ["recipe=verl", *(f"{key}={value}" for key, value in words.items())])
    config.recipe = "small"
    config.trainer.n_gpus_per_node, config.trainer.nnodes = 2, int(os.environ.get("NNODES", "1"))
    with handle_stop_signals() as signals:
        sys.exit(run_until_finished(config, signals, restarts=int(restarts), provenance={}))
