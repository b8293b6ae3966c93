"""Program for torchrun: computes loss and gradients of one global batch in several ways; rank 0 writes them.

Arguments: directory of the quickstart, data, output, and keys of `WAYS` (none for all).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.helpers.trainer import loss_and_gradients, make_trainer, small_config

PLAIN = ("data.packing=false", "model.fused_loss=false", "model.fsdp_config.keep_gathered=false")
WAYS = {
    "plain": PLAIN,
    "plain, 1 sample": (*PLAIN, "data.micro_batch_size_per_gpu=1"),
    "plain, few tokens": (*PLAIN, "data.max_tokens_per_gpu=150"),
    "fused": ("data.packing=false", "model.fsdp_config.keep_gathered=false"),
    "packed": ("model.fsdp_config.keep_gathered=true",),
    "packed, gathered twice": ("data.micro_batch_size_per_gpu=1", "model.fsdp_config.keep_gathered=false"),
    "packed, few tokens": ("data.max_tokens_per_gpu=150", "model.fused_loss=false"),
    "packed, 1 sample": ("data.max_tokens_per_gpu=1", "model.enable_gradient_checkpointing=true"),
}

if __name__ == "__main__":
    quickstart, data, output = map(Path, sys.argv[1:4])
    dist.init_process_group("gloo")
    results = {}
    for way in sys.argv[4:] or WAYS:
        common = (f"data.train_files={data}", "data.max_length=1024", "data.micro_batch_size_per_gpu=4")
        trainer = make_trainer(small_config(quickstart, output.parent / "run", *common, *WAYS[way]))
        loss, gradients = loss_and_gradients(trainer)
        results[way] = {"loss": loss, "gradients": gradients, "validation": trainer.validate(), "packs": trainer.packs}
        results[way]["again"] = loss_and_gradients(trainer)[0]  # parameters that stayed gathered must not be stale
    if dist.get_rank() == 0:
        torch.save(results, output)
    dist.destroy_process_group()
