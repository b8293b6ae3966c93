"""A bare PyTorch loop for the SFT benchmark: no trainer, no sharding, nothing recorded, the batches made beforehand.

    python -m benchmarks.side sft_bare JOB.json

`padded`: micro-batches of like lengths, all logits. `packed`: the rows that our trainer makes, with its attention, all
logits. `tuned`: the same with the logits of learnt tokens alone and our malloc settings, everything that could help.
Under torchrun the gradients of all ranks are averaged by one all-reduce.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.sft_job import Job, tell
from verl_ext.data.batching import MicroBatch, MicroBatchCollator, TokenBatch
from verl_ext.data.chats import ChatDataset
from verl_ext.data.packing import MicroBatchPlan
from verl_ext.data.sampler import GlobalBatchSampler
from verl_ext.trainer.device import keep_freed_memory
from verl_ext.trainer.packed_attention import PACKED_SDPA, packed_arguments
from verl_ext.trainer.stages import SFTConfig, load_config

ROW, PADDED_SAMPLES, SEED = 2048, 4, 42


def batches_of(job: Job, rank: int, num_ranks: int) -> list[TokenBatch]:
    """This rank's batches of all steps, in our trainer's order."""
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    settings = ["data.multiturn.enable=true", "data.truncation=right", f"data.max_length={job.max_length}"]
    config = load_config("sft", settings)
    assert isinstance(config, SFTConfig)
    dataset = ChatDataset(job.data, tokenizer, config.data)
    packs = job.way != "padded"
    plan = MicroBatchPlan(dataset.lengths, packs, ROW if packs else sys.maxsize, None if packs else PADDED_SAMPLES)
    sampler = GlobalBatchSampler(len(dataset), job.batch_size, rank, num_ranks, SEED, plan)
    make, shares = MicroBatchCollator(tokenizer.pad_token_id, packs), iter(sampler)
    return [make([[dataset[row] for row in group] for group in next(shares)]) for _ in range(job.num_steps)]


def loss_of(model: PreTrainedModel, micro_batch: MicroBatch, tuned: bool) -> torch.Tensor:
    """Summed cross-entropy."""
    inputs = {name: micro_batch[name] for name in ("input_ids", "position_ids")}
    if "sample_lengths" in micro_batch:
        inputs |= packed_arguments(micro_batch["sample_lengths"], "cpu")
    else:
        inputs["attention_mask"] = micro_batch["attention_mask"]
    learnt, targets = micro_batch["loss_mask"][:, 1:].bool(), micro_batch["input_ids"][:, 1:]
    if tuned:
        hidden = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1]
        return F.cross_entropy(model.lm_head(hidden[learnt]), targets[learnt], reduction="sum")
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), targets.masked_fill(~learnt, -100).flatten(), reduction="sum")


def main(words: list[str]) -> None:
    """Train, and print each step."""
    job = Job.load(words[0])
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if job.way == "tuned":
        keep_freed_memory()
    attention = "sdpa" if job.way == "padded" else PACKED_SDPA
    model = AutoModelForCausalLM.from_pretrained(job.model, attn_implementation=attention, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, betas=(0.9, 0.95), weight_decay=0.01)
    for batch in batches_of(job, rank, num_ranks):
        begun = time.perf_counter()
        counts = torch.tensor([batch.num_loss_tokens, sum(batch.lengths)], dtype=torch.float64)
        if num_ranks > 1:
            dist.all_reduce(counts)
        for micro_batch in batch.micro_batches:
            (loss_of(model, micro_batch, job.way == "tuned") / counts[0]).backward()
        if num_ranks > 1:
            average(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            tell(int(counts[1]), time.perf_counter() - begun)


def average(model: torch.nn.Module) -> None:
    """Sum the gradients of all ranks, in one message."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, summed in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(summed.view_as(gradient))
