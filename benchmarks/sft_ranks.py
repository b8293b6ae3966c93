"""The bare loop and stock verl of `benchmarks.sft`, and the inputs of all sides.

The chats are functions of Python's standard library, and the model has 26M random parameters. The tokenizer is trained
on the same functions, so that a token holds as much text as with a tokenizer for code.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks.harness import log_row, qwen2_size
from benchmarks.sft import BATCH_SIZE, LR, MAX_LENGTH, ROW, STOCK_BATCH_SIZE
from verl_ext.config.schema import as_dict
from verl_ext.data.batching import MicroBatch, MicroBatchCollator, MicroBatchPlan, TokenBatch, packed_arguments
from verl_ext.data.chats import ChatDataset
from verl_ext.data.prepare import prepare
from verl_ext.data.prepare.quickstart import CHAT_TEMPLATE, PAD, TURN_END, TURN_START
from verl_ext.data.sampler import GlobalBatchSampler
from verl_ext.trainer.device import keep_freed_memory
from verl_ext.trainer.packed_attention import PACKED_SDPA
from verl_ext.trainer.stages import SFTConfig, load_config

VOCAB_SIZE = 16384
PADDED_SAMPLES, STOCK_SAMPLES, SEED = 4, 4, 42
DATA = ("data.multiturn.enable=true", "data.truncation=right", f"data.max_length={MAX_LENGTH}")


# Inputs


def write_inputs(directory: Path) -> None:
    """Write `chats/train.parquet` and `model/`."""
    prepare(["stdlib", "--output", str(directory / "chats")])
    chats = pd.read_parquet(directory / "chats/train.parquet")["messages"]
    tokenizer = train_tokenizer([turn["content"] for chat in chats for turn in chat])
    torch.manual_seed(0)
    config = Qwen2Config(
        **qwen2_size(512, 1408, layers=6, heads=8, vocab=VOCAB_SIZE, tied=True),
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["Qwen2ForCausalLM"],
    )
    Qwen2ForCausalLM(config).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on these texts, and add a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [TURN_START, TURN_END, PAD]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    return fast


# A bare loop


def bare(scratch: str, variant: str, num_steps: str) -> None:
    """A bare PyTorch loop: no trainer, no sharding, no logging, and all batches are created beforehand.

    `padded`: micro-batches of similar lengths, all logits. `packed`: our trainer's rows and attention, all logits.
    `tuned`: like `packed`, but with the logits of loss tokens only and our malloc settings. Under torchrun, one
    all-reduce sums the gradients of all ranks.
    """
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if variant == "tuned":
        keep_freed_memory()
    path, attention = f"{scratch}/model", "sdpa" if variant == "padded" else PACKED_SDPA
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    made = batches_of(scratch, variant != "padded", rank, num_ranks)
    for batch in [next(made) for _ in range(int(num_steps))]:
        begun = time.perf_counter()
        counts = torch.tensor([batch.num_loss_tokens, sum(batch.lengths)], dtype=torch.float64)
        if num_ranks > 1:
            dist.all_reduce(counts)
        for micro_batch in batch.micro_batches:
            (loss_of(model, micro_batch, variant == "tuned") / counts[0]).backward()
        if num_ranks > 1:
            all_reduce_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            log_row(tokens=int(counts[1]), seconds=time.perf_counter() - begun)


def batches_of(scratch: str, packs: bool, rank: int, num_ranks: int) -> Iterator[TokenBatch]:
    """This rank's batches, in our trainer's order."""
    tokenizer = AutoTokenizer.from_pretrained(f"{scratch}/model")
    config = load_config("sft", DATA)
    assert isinstance(config, SFTConfig)
    dataset = ChatDataset(f"{scratch}/chats/train.parquet", tokenizer, config.data)
    plan = MicroBatchPlan(dataset.lengths, packs, ROW if packs else sys.maxsize, None if packs else PADDED_SAMPLES)
    collate = MicroBatchCollator(tokenizer.pad_token_id, packs)
    for groups in GlobalBatchSampler(len(dataset), BATCH_SIZE, rank, num_ranks, SEED, plan):
        yield collate([[dataset[row] for row in group] for group in groups])


def loss_of(model: PreTrainedModel, micro_batch: MicroBatch, tuned: bool) -> torch.Tensor:
    """Summed cross-entropy."""
    inputs = {name: micro_batch[name] for name in ("input_ids", "position_ids")}
    if "sample_lengths" in micro_batch:
        inputs |= packed_arguments(micro_batch["sample_lengths"], "cpu")
    else:
        inputs["attention_mask"] = micro_batch["attention_mask"]
    in_loss, targets = micro_batch["loss_mask"][:, 1:].bool(), micro_batch["input_ids"][:, 1:]
    if tuned:
        hidden = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1]
        return F.cross_entropy(model.lm_head(hidden[in_loss]), targets[in_loss], reduction="sum")
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), targets.masked_fill(~in_loss, -100).flatten(), reduction="sum")


def all_reduce_gradients(model: torch.nn.Module) -> None:
    """Sum the gradients of all ranks in one all-reduce."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    vector_to_parameters(flat, gradients)


# Stock verl


def stock(scratch: str, variant: str, num_steps: str) -> None:
    """verl's own `FSDPSFTTrainer` as released, with the changes that it needs on a CPU.

    It requires flash-attention, which has no CPU kernel, so sdpa replaces it. `bf16` is as shipped; `fp32` has no
    autocast and no bf16 weights, which is faster on a CPU without bf16 units.
    """
    import verl.trainer.fsdp_sft_trainer as verl_sft  # here, because the bare loop does not need verl

    dist.init_process_group("gloo")
    config, size = stock_config(scratch), dist.get_world_size()
    meshes = (
        init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",)),
        init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "sp")),
    )
    tokenizer = AutoTokenizer.from_pretrained(config.model.partial_pretrain)
    dataset = verl_sft.create_sft_dataset([config.data.train_files], config.data, tokenizer)
    load = AutoModelForCausalLM.from_pretrained

    def load_with_sdpa(*arguments: Any, **named: Any) -> PreTrainedModel:
        return load(*arguments, **{**named, "attn_implementation": "sdpa"})

    with mock.patch.object(AutoModelForCausalLM, "from_pretrained", load_with_sdpa):
        if variant == "fp32":
            policy = verl_sft.MixedPrecisionPolicy
            in_fp32 = lambda **named: policy(**{**named, "param_dtype": torch.float32})  # noqa: E731
            mock.patch.object(verl_sft, "MixedPrecisionPolicy", in_fp32).start()
            mock.patch.object(torch, "autocast", lambda *_, **__: nullcontext()).start()
        trainer = verl_sft.FSDPSFTTrainer(config, *meshes, tokenizer, dataset, dataset)
    batches = iter(trainer.train_dataloader)
    for _ in range(int(num_steps)):
        begun = time.perf_counter()
        batch = TensorDict(next(batches), batch_size=trainer.config.data.train_batch_size)
        trainer.training_step(batch)
        tokens = batch["attention_mask"].sum()
        dist.all_reduce(tokens)
        if dist.get_rank() == 0:
            log_row(tokens=int(tokens), seconds=time.perf_counter() - begun)


def stock_config(scratch: str) -> DictConfig:
    """verl's own keys, without one of ours that verl would read: it does not replace null by the model's layers."""
    words = [
        *DATA,
        f"data.train_files={scratch}/chats/train.parquet",
        f"data.val_files={scratch}/chats/train.parquet",
        f"data.train_batch_size={STOCK_BATCH_SIZE}",
        f"data.micro_batch_size_per_gpu={STOCK_SAMPLES}",
        f"model.partial_pretrain={scratch}/model",
        "model.enable_gradient_checkpointing=false",
        f"optim.lr={LR}",
        f"trainer.default_local_dir={scratch}/out",
        "trainer.resume_mode=disable",
        "trainer.device=cpu",
    ]
    values = OmegaConf.create(as_dict(load_config("sft", words)))
    del values.model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap
    return values
