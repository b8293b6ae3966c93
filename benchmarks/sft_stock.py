"""verl's own `FSDPSFTTrainer` for the SFT benchmark, as released but for what keeps it from running on a CPU.

    torchrun --nproc-per-node=2 -m benchmarks.side sft_stock JOB.json

It insists on flash-attention, which has no CPU kernel: sdpa takes its place. `bf16` is as shipped; `fp32` has no
autocast and no bf16 weights, which on a CPU without bf16 units is the quicker way.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import verl.trainer.fsdp_sft_trainer as stock
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer

from benchmarks.sft_job import Job, tell
from verl_ext.config.schema import as_dict
from verl_ext.trainer.stages import load_config

MICRO_BATCH_SIZE = 4


def config_of(job: Job) -> Any:
    """Of verl's own keys, without one of ours that verl would read: null there is no layer in place of the model's."""
    config = load_config(
        "sft",
        [
            "data.multiturn.enable=true",
            "data.truncation=right",
            f"data.max_length={job.max_length}",
            f"data.train_files={job.data}",
            f"data.val_files={job.data}",
            f"data.train_batch_size={job.batch_size}",
            f"data.micro_batch_size_per_gpu={MICRO_BATCH_SIZE}",
            f"model.partial_pretrain={job.model}",
            "model.enable_gradient_checkpointing=false",
            f"optim.lr={job.lr}",
            f"trainer.default_local_dir={job.output}",
            "trainer.resume_mode=disable",
            "trainer.device=cpu",
        ],
    )
    values = OmegaConf.create(as_dict(config))
    del values.model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap
    return values


def main(words: list[str]) -> None:
    """Train, and print each step."""
    job = Job.load(words[0])
    dist.init_process_group("gloo")
    config, size = config_of(job), dist.get_world_size()
    sharding = init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
    sequence = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "sp"))
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    dataset = stock.create_sft_dataset([job.data], config.data, tokenizer)
    load = AutoModelForCausalLM.from_pretrained

    def with_sdpa(*arguments: Any, **named: Any) -> Any:
        return load(*arguments, **{**named, "attn_implementation": "sdpa"})

    with mock.patch.object(AutoModelForCausalLM, "from_pretrained", with_sdpa):
        if job.way == "fp32":
            in_fp32()
        trainer = FSDPSFTTrainer(config, sharding, sequence, tokenizer, dataset, dataset)
    batches = iter(trainer.train_dataloader)
    for _ in range(job.num_steps):
        begun = time.perf_counter()
        batch = TensorDict(next(batches), batch_size=trainer.config.data.train_batch_size)
        trainer.training_step(batch)
        tokens = batch["attention_mask"].sum()
        dist.all_reduce(tokens)
        if dist.get_rank() == 0:
            tell(int(tokens), time.perf_counter() - begun)


def in_fp32() -> None:
    """Have verl's module shard and compute in fp32."""
    policy = stock.MixedPrecisionPolicy
    mock.patch.object(stock, "MixedPrecisionPolicy", lambda **k: policy(**{**k, "param_dtype": torch.float32})).start()
    mock.patch.object(torch, "autocast", lambda *a, **k: nullcontext()).start()
