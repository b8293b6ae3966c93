"""The launcher on small ranks.

`python -m tests.ranks.small_launch RUN_DIR GRACE_S RESTARTS FIRST_PAUSE_S LEAVE_AFTER_S`
"""

from __future__ import annotations

import os
import sys

from omegaconf import OmegaConf

from verl_ext.launch import keeper
from verl_ext.launch.__main__ import stoppable
from verl_ext.launch.run import run_to_the_end

if __name__ == "__main__":
    run_dir, grace_s, restarts, first_pause_s, leave_after_s = sys.argv[1:]
    keeper.LEAVE_AFTER_S = float(leave_after_s)
    trainer = {
        "default_local_dir": run_dir,
        "project_name": "tests",
        "experiment_name": "small",
        "resume_mode": os.environ.get("SMALL_RESUME_MODE", "auto"),
        "resume_from_path": None,
        "n_gpus_per_node": 2,
        "nnodes": int(os.environ.get("NNODES", "1")),
        "preemption": {"grace_s": float(grace_s)},
        "checkpoint": {"save_contents": ["model"], "load_contents": ["model", "optimizer", "extra"]},
        "total_epochs": 1,
        "total_training_steps": None,
    }
    optim = {"optimizer": "AdamW", "optimizer_impl": "torch.optim"}
    others = {"data": {}, "optim": optim, "model": {"partial_pretrain": "org/name"}, "eval": {"watch": False}}
    config = OmegaConf.create({"stage": "sft", "recipe": "small", "trainer": trainer, **others})
    sys.exit(
        stoppable(
            lambda signals: run_to_the_end(
                config,
                signals,
                restarts=int(restarts),
                module="tests.ranks.small_ranks",
                first_pause_s=float(first_pause_s),
            )
        )
    )
