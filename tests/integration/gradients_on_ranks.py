"""Run by torchrun: loss and gradients of one global batch for several micro-batch sizes, written by rank 0."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.training import loss_and_gradients, make_trainer, small_config

if __name__ == "__main__":
    quickstart, data, output = map(Path, sys.argv[1:4])
    dist.init_process_group("gloo")
    results = {}
    for size in (1, 2, 4):
        overrides = (f"data.micro_batch_size_per_gpu={size}", f"data.train_files={data}", "data.max_length=1024")
        trainer = make_trainer(small_config(quickstart, output.parent / "run", *overrides))
        loss, gradients = loss_and_gradients(trainer)
        results[size] = {"loss": loss, "gradients": gradients, "validation": trainer.validate()}
    if dist.get_rank() == 0:
        torch.save(results, output)
    dist.destroy_process_group()
