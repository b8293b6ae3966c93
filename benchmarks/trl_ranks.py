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
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from benchmarks.grpo import GROUP_SIZE, MAX_TOKENS, MICRO_BATCH_SIZE, PROMPTS, variety
from benchmarks.grpo import LR as GRPO_LR
from benchmarks.harness import log_row
from benchmarks.sft import BATCH_SIZE, MAX_LENGTH
from benchmarks.sft import LR as SFT_LR

ON_CPU = {"use_cpu": True, "gradient_checkpointing": False, "lr_scheduler_type": "constant", "disable_tqdm": True}
SILENT = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none"}
P = ParamSpec("P")
R = TypeVar("R")


# SFT


class SFTStepLogger(TrainerCallback):
    """Logs every step with its tokens. TRL counts them over all ranks, without padding."""

    trainer: SFTTrainer
    started = 0.0
    tokens = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Data is loaded before a step, so its time counts from the end of the previous step."""
        self.started = self.started or time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Log the step."""
        now, tokens = time.perf_counter(), self.trainer._total_train_tokens
        if self.trainer.accelerator.is_main_process:
            log_row(tokens=tokens - self.tokens, seconds=now - self.started)
        self.started, self.tokens = now, tokens


def sft(scratch: str, variant: str, num_steps: str) -> None:
    """Train with TRL's `SFTTrainer`.

    `unpacked_N`: N samples of similar lengths in a forward pass. `packed_N`: N rows of MAX_LENGTH tokens from TRL's
    first-fit-decreasing packing. The suffix `_bf16`: forward pass in bf16, weights in fp32.
    """
    kind, size, *precision = variant.split("_")
    chats = [[dict(turn) for turn in chat] for chat in pd.read_parquet(f"{scratch}/chats/train.parquet")["messages"]]
    rows = [{"prompt": chat[:1], "completion": chat[1:]} for chat in chats]
    # a packed row of MAX_LENGTH tokens replaces several samples, so that a step has as many tokens
    samples_per_row = 1 if kind == "unpacked" else MAX_LENGTH / 200
    per_rank = max(1, round(BATCH_SIZE / samples_per_row / int(os.environ["WORLD_SIZE"])))
    config = SFTConfig(
        **ON_CPU,
        **SILENT,
        output_dir=f"{scratch}/out",
        bf16=precision == ["bf16"],
        max_length=MAX_LENGTH,
        packing=kind == "packed",
        per_device_train_batch_size=int(size),
        gradient_accumulation_steps=max(1, per_rank // int(size)),
        train_sampling_strategy="group_by_length" if kind == "unpacked" else "random",
        max_steps=int(num_steps),
        learning_rate=SFT_LR,
        adam_beta2=0.95,
        weight_decay=0.01,
        max_grad_norm=1.0,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
    )
    model = AutoModelForCausalLM.from_pretrained(f"{scratch}/model", attn_implementation="sdpa", dtype=torch.float32)
    tokenizer, logger = AutoTokenizer.from_pretrained(f"{scratch}/model"), SFTStepLogger()
    logger.trainer = SFTTrainer(
        model, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[logger]
    )
    logger.trainer.train()


# GRPO


class PartClock:
    """Seconds by part since the last `pop`; time of a nested part is subtracted from the outer part."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """Wrap a function so that its time counts under this name."""

        @wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                seconds = time.perf_counter() - started
                self._seconds[name] += seconds - self._inner.pop()
                self._inner[-1] += seconds

        return call

    def pop(self) -> dict[str, float]:
        """The seconds since the last call."""
        found, self._seconds = dict(self._seconds), defaultdict(float)
        return found


class GRPOStepLogger(TrainerCallback):
    """Times the parts of TRL's trainer without changing its methods, and logs every step."""

    def __init__(self) -> None:
        self._clock = PartClock()
        self._begun = 0.0

    def attach(self, trainer: GRPOTrainer) -> None:
        """Time the methods that generate, compute rewards, and compute the update."""
        timed = self._clock.timed
        trainer._generate_single_turn = timed("generation_s", trainer._generate_single_turn)
        trainer._calculate_rewards = timed("reward_s", trainer._calculate_rewards)
        trainer.compute_loss = timed("model_s", trainer.compute_loss)
        trainer.accelerator.backward = timed("model_s", trainer.accelerator.backward)
        trainer._get_per_token_logps_and_entropies = timed("model_s", trainer._get_per_token_logps_and_entropies)
        trainer.accelerator.clip_grad_norm_ = timed("model_s", trainer.accelerator.clip_grad_norm_)
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Time the optimizer, which exists only now."""
        optimizer = self._trainer.optimizer
        optimizer.step = self._clock.timed("model_s", optimizer.step)
        self._begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Log the step."""
        now = time.perf_counter()
        mean_length = self._trainer._metrics["train"]["completions/mean_length"][-1]
        parts = self._clock.pop()
        if self._trainer.accelerator.is_main_process:
            log_row(step_s=now - self._begun, **parts, tokens_mean=mean_length)
        self._begun = now


def grpo(model: str, scratch: str, num_steps: str) -> None:
    """Train with TRL's `GRPOTrainer` on the `prompts.parquet` of a directory."""
    prompts = pd.read_parquet(f"{scratch}/prompts.parquet")["prompt"].tolist()
    rows = [{"prompt": [dict(turn) for turn in prompt]} for prompt in prompts] * int(num_steps)
    config = GRPOConfig(
        **ON_CPU,
        **SILENT,
        output_dir=f"{scratch}/out",
        per_device_train_batch_size=MICRO_BATCH_SIZE,
        gradient_accumulation_steps=PROMPTS * GROUP_SIZE // int(os.environ["WORLD_SIZE"]) // MICRO_BATCH_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
        max_steps=int(num_steps),
        learning_rate=GRPO_LR,
        beta=0.0,
        epsilon=0.2,
        temperature=1.0,
        shuffle_dataset=False,
        bf16=False,
    )
    logger = GRPOStepLogger()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        reward_funcs=variety,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[logger],
    )
    logger.attach(trainer)
    trainer.train()
