"""Trains by TRL's `GRPOTrainer` and tells where each step's time went: run by `grpo.py`.

    torchrun -m benchmarks.side grpo_peer JOB.json

Rank 0 prints a line of JSON for every step, behind the word STEP, after one with the versions behind ABOUT. The trainer
is TRL's own; its methods are called through a clock, and nothing in them is changed.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.grpo_reward import variety


class Clock:
    """Seconds by part since they were last asked for; a part inside another is taken off the outer one."""

    def __init__(self) -> None:
        """Nothing is under way."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its own time counted under this name."""

        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
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


class Watch(TrainerCallback):
    """Puts the clock to the trainer's methods, and prints a line at the end of each step."""

    def __init__(self) -> None:
        """See `attach`."""
        self._clock = Clock()
        self._begun = 0.0

    def attach(self, trainer: GRPOTrainer) -> None:
        """Put the clock to what generates, rewards and computes."""
        timed = self._clock.timed
        trainer._generate_single_turn = timed("generation_s", trainer._generate_single_turn)
        trainer._calculate_rewards = timed("reward_s", trainer._calculate_rewards)
        trainer.compute_loss = timed("model_s", trainer.compute_loss)
        trainer.accelerator.backward = timed("model_s", trainer.accelerator.backward)
        trainer._get_per_token_logps_and_entropies = timed("model_s", trainer._get_per_token_logps_and_entropies)
        trainer.accelerator.clip_grad_norm_ = timed("model_s", trainer.accelerator.clip_grad_norm_)
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The optimizer is there only now."""
        optimizer = self._trainer.optimizer
        optimizer.step = self._clock.timed("model_s", optimizer.step)
        self._begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Print the step that has ended."""
        now = time.perf_counter()
        lengths = self._trainer._metrics["train"]["completions/mean_length"][-1]
        step = {"step_s": now - self._begun, **self._clock.pop(), "tokens_mean": lengths}
        if self._trainer.accelerator.is_main_process:
            print("STEP", json.dumps(step), flush=True)
        self._begun = now


def main(words: list[str]) -> None:
    """Train as the job says."""
    job = json.loads(Path(words[0]).read_text())
    print("ABOUT", json.dumps({name: version(name) for name in ("trl", "transformers", "accelerate")}), flush=True)
    prompts = pd.read_parquet(job["prompts"])["prompt"].tolist()
    rows = [{"prompt": [dict(turn) for turn in prompt]} for prompt in prompts] * job["num_steps"]
    config = GRPOConfig(
        output_dir=job["output"],
        per_device_train_batch_size=job["micro_batch_size"],
        gradient_accumulation_steps=job["num_samples"] // job["micro_batch_size"],
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        max_steps=job["num_steps"],
        learning_rate=job["lr"],
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
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="float32")
    watch = Watch()
    trainer = GRPOTrainer(
        model=model, reward_funcs=variety, args=config, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, callbacks=[watch],
    )  # fmt: skip
    watch.attach(trainer)
    trainer.train()
