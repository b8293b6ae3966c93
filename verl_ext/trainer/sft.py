"""Supervised fine-tuning: the mean cross-entropy over the loss tokens of the whole global batch."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from verl.utils.flops_counter import FlopsCounter

from verl_ext.data.batching import MicroBatch, TokenBatch, validation_micro_batches
from verl_ext.data.dataset import SampleDataset
from verl_ext.distributed import reduce_over_ranks
from verl_ext.trainer.hardware import peak_memory
from verl_ext.trainer.loop import Metrics
from verl_ext.trainer.sft_setup import SFTSetup


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a float cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class SFTTrainer(SFTSetup):
    """Trains on chats: every assistant token of the global batch weighs the same."""

    def training_step(self, batch: Any) -> Metrics:
        """One optimizer step; see `PipelineTrainer.training_step`."""
        lr, made = self.lr_scheduler.get_last_lr()[0], self.tensors_of(batch)
        self.fsdp_model.train()
        with self.timer.measure("forward_backward"):
            mean, num_loss_tokens = self.forward_backward(made)
        with self.timer.measure("optimizer"):
            loss, grad_norm = self.optimizer_step(mean)
        return {
            "train/loss": loss,
            "train/lr(1e-3)": lr * 1e3,
            "train/grad_norm": grad_norm,
            "train/perplexity": perplexity(loss),
            "train/num_loss_tokens": num_loss_tokens,
            "train/epoch": self.global_step / self.steps_per_epoch,
            "train/skipped_steps": self.guard.num_skipped,
            **self.measure_step(made),
        }

    def tensors_of(self, batch: Any) -> TokenBatch:
        """What the batcher has made, as tensors."""
        return batch

    def forward_backward(self, batch: TokenBatch) -> tuple[torch.Tensor, float]:
        """Accumulate the gradient of the global mean over all micro-batches and ranks.

        FSDP averages gradients over ranks, so each rank's sum is scaled by ranks / tokens of the global batch; neither
        the micro-batch size nor the number of ranks changes the result.

        Returns:
            The mean loss, a scalar that a GPU may still be working on, and the number of loss tokens of the global
            batch, both the same on every rank.
        """
        num_tokens = max(self.sum_over_data_ranks(batch.num_loss_tokens), 1.0)
        total = torch.zeros((), dtype=torch.float64, device=self.device_name)
        with self.sequence_parallelism():  # around backward too, where checkpointed layers run forward again
            for number, micro_batch in enumerate(batch.micro_batches):
                self.gathering.begin(is_last=number == len(batch.micro_batches) - 1)
                with self.what_runs(number):
                    loss = self.summed_loss(micro_batch)
                    (loss * (self.dp_size / num_tokens)).backward()
                total += loss.detach()
        dist.all_reduce(total)
        return total / (num_tokens * self.config.sequence_parallel_size), num_tokens

    def what_runs(self, number: int) -> AbstractContextManager[None]:
        """Around a micro-batch, counted within the step: which part of the model runs; all of it here."""
        return nullcontext()

    def sequence_parallelism(self) -> AbstractContextManager:
        """Where attention is split over the ranks of a sequence; nothing when each rank has whole sequences."""
        return self.sharding_manager if self.config.sequence_parallel_size > 1 else nullcontext()

    def summed_loss(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Sum of the cross-entropy over a micro-batch's loss tokens, a scalar with gradient."""
        if self.config.sequence_parallel_size > 1:
            tensors = {name: tensor.to(self.device_name) for name, tensor in micro_batch.items()}
            return self.summed_loss_over_sequence_ranks(tensors)
        return self.token_loss(micro_batch)

    def summed_loss_over_sequence_ranks(self, tensors: MicroBatch) -> torch.Tensor:
        """The same with the sequence split by Ulysses: verl's own forward pass, its local mean made a sum again."""
        num_tokens = tensors["loss_mask"][:, 1:].sum()
        return self._compute_loss_and_backward(tensors, do_backward=False) * num_tokens

    def sum_over_data_ranks(self, value: float) -> float:
        """Sum over data-parallel ranks; the ranks of one sequence-parallel group hold the same samples.

        On the CPU, where the value is: no GPU is waited for.
        """
        reduced = reduce_over_ranks(sums={"value": value})["value"]
        return reduced / self.config.sequence_parallel_size

    def measure_step(self, batch: TokenBatch) -> Metrics:
        """Where the step's time and memory went: the slowest rank's seconds, all ranks' throughput."""
        seconds = time.perf_counter() - self.step_start
        parts = {f"time/train/{part}_s": value for part, value in self.timer.pop().items()}
        compute = parts["time/train/forward_backward_s"] + parts["time/train/optimizer_s"]
        reduced = reduce_over_ranks(
            sums={"tokens": sum(batch.lengths), "samples": len(batch.rows), **self.flops(batch, seconds)},
            maxima={**parts, "time/train/step_s": seconds, "train/time(s)": compute, **peak_memory(self.device_name)},
        )
        copies = self.config.sequence_parallel_size  # of each sample
        step_s = reduced["time/train/step_s"]
        reduced["throughput/train/tokens_per_s"] = reduced.pop("tokens") / copies / step_s
        reduced["throughput/train/samples_per_s"] = reduced.pop("samples") / copies / step_s
        if "mfu" in reduced:
            reduced["throughput/train/mfu"] = reduced.pop("mfu") / (self.dp_size * copies) / copies
        return reduced

    def flops(self, batch: TokenBatch, seconds: float) -> Metrics:
        """This rank's share of the GPU's peak by verl's count; nothing on a CPU, whose peak verl only guesses."""
        if self.device_name != "cuda":
            return {}
        achieved, peak = self.flops_counter.estimate_flops(batch.lengths, seconds)
        return {"mfu": achieved / peak}

    @cached_property
    def flops_counter(self) -> FlopsCounter:
        """verl's count of a model's operations."""
        return FlopsCounter(self.model_config)

    @torch.no_grad()
    def validate(self) -> Metrics:
        """Token-weighted loss over the whole validation set, the same for any number of ranks."""
        if self.val_dataset is None:
            return {}
        start = time.perf_counter()
        self.fsdp_model.eval()
        try:
            mean, num_loss_tokens = self.mean_loss(self.val_dataset)
        finally:
            self.gathering.release()
        return {
            "val/loss": mean,
            "val/perplexity": perplexity(mean),
            "val/num_loss_tokens": num_loss_tokens,
            "time/val/step_s": time.perf_counter() - start,
        }

    def mean_loss(self, dataset: SampleDataset) -> tuple[float, float]:
        """Cross-entropy of a whole data set in nats per loss token, and the number of those; the same on every rank."""
        plan, num_tokens = self.validation_plan(dataset), 0
        total = torch.zeros((), dtype=torch.float64, device=self.device_name)
        make, rank, num_ranks = self.batcher.micro_batch, self.dp_rank, self.dp_size
        for micro_batch in validation_micro_batches(dataset, plan, make, rank, num_ranks):
            self.preemption.check()
            num_tokens += int(micro_batch["loss_mask"][:, 1:].sum())
            total += self.summed_loss(micro_batch)
        num_loss_tokens = self.sum_over_data_ranks(num_tokens)
        return self.sum_over_data_ranks(float(total)) / num_loss_tokens, num_loss_tokens
