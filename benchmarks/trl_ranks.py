"""TRL's `SFTTrainer` and `GRPOTrainer` for `benchmarks.sft` and `benchmarks.grpo`, on DDP."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import pandas as pd
import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from benchmarks.grpo import GRPOJob
from benchmarks.grpo_reward import variety
from benchmarks.harness import log_step, log_versions, read_job
from benchmarks.sft import SFTJob

PACKAGES = ("trl", "transformers", "accelerate")
P = ParamSpec("P")
R = TypeVar("R")


# SFT


class CountingSFTTrainer(SFTTrainer):
    """TRL's trainer, which counts the tokens that are not padding."""

    tokens = 0

    def compute_loss(
        self, model: PreTrainedModel, inputs: dict[str, torch.Tensor], *arguments: Any, **named: Any
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """See TRL's."""
        mask = inputs.get("attention_mask")
        pad = self.processing_class.pad_token_id
        self.tokens += int(mask.sum() if mask is not None else (inputs["input_ids"] != pad).sum())
        return super().compute_loss(model, inputs, *arguments, **named)


class SFTStepLogger(TrainerCallback):
    """Logs every step."""

    trainer: CountingSFTTrainer
    begun = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """A step's data are loaded before it; they count from the end of the step before."""
        self.begun = self.begun or time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Log the tokens of all ranks."""
        tokens = torch.tensor(self.trainer.tokens)
        dist.all_reduce(tokens)
        now = time.perf_counter()
        if dist.get_rank() == 0:
            log_step(tokens=int(tokens), seconds=now - self.begun)
        self.begun, self.trainer.tokens = now, 0


def sft(job_file: str) -> None:
    """Train by TRL's `SFTTrainer`.

    `unpacked_N`: N samples in a forward pass, those of similar lengths together. `packed_N`: N rows of max_length
    tokens from TRL's first-fit-decreasing packing. `_bf16` at the end: the forward pass in bf16, weights in fp32.
    """
    job = read_job(SFTJob, job_file)
    kind, size, *precision = job.variant.split("_")
    chats = [[dict(turn) for turn in chat] for chat in pd.read_parquet(job.data)["messages"]]
    rows = [{"prompt": chat[:1], "completion": chat[1:]} for chat in chats]
    # a packed row of max_length tokens stands for several samples, so that a step has as many tokens
    samples_per_row = 1 if kind == "unpacked" else job.max_length / 200
    per_rank = max(1, round(job.batch_size / samples_per_row / int(os.environ["WORLD_SIZE"])))
    config = SFTConfig(
        output_dir=job.output,
        use_cpu=True,
        bf16=precision == ["bf16"],
        gradient_checkpointing=False,
        max_length=job.max_length,
        packing=kind == "packed",
        per_device_train_batch_size=int(size),
        gradient_accumulation_steps=max(1, per_rank // int(size)),
        train_sampling_strategy="group_by_length" if kind == "unpacked" else "random",
        max_steps=job.num_steps,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.01,
        max_grad_norm=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
    )
    model = AutoModelForCausalLM.from_pretrained(job.model, attn_implementation="sdpa", dtype=torch.float32)
    tokenizer, logger = AutoTokenizer.from_pretrained(job.model), SFTStepLogger()
    trainer = CountingSFTTrainer(
        model, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[logger]
    )
    logger.trainer = trainer
    if trainer.accelerator.is_main_process:
        log_versions(*PACKAGES)
    trainer.train()


# GRPO


class PartClock:
    """Seconds by part since they were last read; a part inside another one is subtracted from the outer one."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """The function, with its own time counted under this name."""

        @wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            self._inner.append(0.0)
            begun = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                seconds = time.perf_counter() - begun
                self._seconds[name] += seconds - self._inner.pop()
                self._inner[-1] += seconds

        return call

    def pop(self) -> dict[str, float]:
        """The seconds since the last call."""
        found, self._seconds = dict(self._seconds), defaultdict(float)
        return found


class GRPOStepLogger(TrainerCallback):
    """Times the parts of TRL's trainer, whose methods stay as they are, and logs every step."""

    def __init__(self) -> None:
        self._clock = PartClock()
        self._begun = 0.0

    def attach(self, trainer: GRPOTrainer) -> None:
        """Time what generates, rewards and computes."""
        timed = self._clock.timed
        trainer._generate_single_turn = timed("generation_s", trainer._generate_single_turn)
        trainer._calculate_rewards = timed("reward_s", trainer._calculate_rewards)
        trainer.compute_loss = timed("model_s", trainer.compute_loss)
        trainer.accelerator.backward = timed("model_s", trainer.accelerator.backward)
        trainer._get_per_token_logps_and_entropies = timed("model_s", trainer._get_per_token_logps_and_entropies)
        trainer.accelerator.clip_grad_norm_ = timed("model_s", trainer.accelerator.clip_grad_norm_)
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The optimizer exists only now."""
        optimizer = self._trainer.optimizer
        optimizer.step = self._clock.timed("model_s", optimizer.step)
        self._begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Log the step."""
        now = time.perf_counter()
        mean_length = self._trainer._metrics["train"]["completions/mean_length"][-1]
        parts = self._clock.pop()
        if self._trainer.accelerator.is_main_process:
            log_step(step_s=now - self._begun, **parts, tokens_mean=mean_length)
        self._begun = now


def grpo(job_file: str) -> None:
    """Train by TRL's `GRPOTrainer`."""
    job = read_job(GRPOJob, job_file)
    prompts = pd.read_parquet(job.prompts)["prompt"].tolist()
    rows = [{"prompt": [dict(turn) for turn in prompt]} for prompt in prompts] * job.num_steps
    config = GRPOConfig(
        output_dir=job.output,
        per_device_train_batch_size=job.micro_batch_size,
        gradient_accumulation_steps=job.num_samples // job.micro_batch_size,
        num_generations=job.group_size,
        max_completion_length=job.max_tokens,
        max_steps=job.num_steps,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        epsilon=0.2,
        temperature=1.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype="float32")
    logger = GRPOStepLogger()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=variety,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[logger],
    )
    logger.attach(trainer)
    if trainer.accelerator.is_main_process:
        log_versions(*PACKAGES)
    trainer.train()
