"""TRL's `SFTTrainer` for the SFT benchmark, on DDP, as torchrun starts it.

    torchrun --nproc-per-node=2 -m benchmarks.side sft_peer JOB.json

`unpacked_N`: N samples of a step's part in a forward pass, those of like lengths together. `packed_N`: N rows of
max_length tokens, TRL's first-fit-decreasing packing. `_bf16` at the end: the forward pass in bf16, weights in fp32.
"""

from __future__ import annotations

import json
import os
import time
from importlib.metadata import version
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.sft_job import Job, tell


class Counted(SFTTrainer):
    """TRL's trainer, which counts what it has seen of tokens that are no padding."""

    tokens = 0

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        """See TRL's."""
        mask = inputs.get("attention_mask")
        pad = self.processing_class.pad_token_id
        self.tokens += int(mask.sum() if mask is not None else (inputs["input_ids"] != pad).sum())
        return super().compute_loss(model, inputs, *arguments, **named)


class Watch(TrainerCallback):
    """Prints a line at the end of each step."""

    trainer: Counted
    begun = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The step's data are loaded before it; they count from the end of the step before."""
        self.begun = self.begun or time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Tokens of all ranks."""
        tokens = torch.tensor(self.trainer.tokens)
        dist.all_reduce(tokens)
        now = time.perf_counter()
        if dist.get_rank() == 0:
            tell(int(tokens), now - self.begun)
        self.begun, self.trainer.tokens = now, 0


def main(words: list[str]) -> None:
    """Train as the job says."""
    job = Job.load(words[0])
    kind, size, *precision = job.way.split("_")
    chats = [[dict(turn) for turn in chat] for chat in pd.read_parquet(job.data)["messages"]]
    rows = [{"prompt": chat[:1], "completion": chat[1:]} for chat in chats]
    watch = Watch()
    # a packed row of max_length tokens stands for so many samples, so that a step has as many tokens
    a_row = 1 if kind == "unpacked" else job.max_length / 200
    per_rank = max(1, round(job.batch_size / a_row / int(os.environ["WORLD_SIZE"])))
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
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    trainer = Counted(
        model, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[watch]
    )
    watch.trainer = trainer
    if trainer.accelerator.is_main_process:
        print("ABOUT", json.dumps({name: version(name) for name in ("trl", "transformers", "accelerate")}), flush=True)
    trainer.train()
