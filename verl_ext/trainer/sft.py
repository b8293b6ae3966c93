"""Supervised fine-tuning: the mean cross-entropy over the loss tokens of the whole global batch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from verl_ext.console import warn
from verl_ext.data.batching import (
    Collator,
    MicroBatch,
    MicroBatchCollator,
    MicroBatchPlan,
    RankMicroBatches,
    TokenBatch,
    attention_share,
    plan_micro_batches,
    validation_micro_batches,
)
from verl_ext.data.dataset import SampleDataset, TokenDataset
from verl_ext.distributed import on_every_rank, reduce_over_ranks
from verl_ext.trainer.device import peak_memory
from verl_ext.trainer.fsdp import FSDPReshardPolicy
from verl_ext.trainer.fused_cross_entropy import (
    LOSS_TOLERANCE,
    TokenLoss,
    fused_loss_error,
    install_fused_loss,
)
from verl_ext.trainer.model import compile_blocks, load_model_config
from verl_ext.trainer.packed_attention import enable_packing, trial_samples
from verl_ext.trainer.stages import SFTConfig, VLMSFTConfig
from verl_ext.trainer.tokenizer import sync_eos_token
from verl_ext.trainer.trainer import Metrics, PipelineTrainer
from verl_ext.verl_api import FlopsCounter, FSDPUlyssesShardingManager


class SFTTrainer(PipelineTrainer):
    """Supervised fine-tuning with a token-mean loss over the global batch, packed rows and a fused cross-entropy.

    The loss and its gradient do not depend on the micro-batch size or the number of ranks.

    Attributes:
        token_loss: computes the summed loss of a micro-batch.
    """

    config: SFTConfig | VLMSFTConfig
    collator: Collator
    token_loss: TokenLoss

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # verl's `_compute_loss_and_backward` reads these, besides configuration, model and meshes.
        self.use_remove_padding = self.config.use_remove_padding
        self.sharding_manager = FSDPUlyssesShardingManager(self.ulysses_device_mesh)

    # Building

    @cached_property
    def packs(self) -> bool:
        """Whether samples are packed into rows; set to false if the model does not support it."""
        return self.config.packs_samples

    def build_collator(self) -> Collator:
        return MicroBatchCollator(self.tokenizer.pad_token_id, self.packs)

    def training_plan(self, dataset: SampleDataset) -> MicroBatchPlan | None:
        return self.validation_plan(dataset)

    def validation_plan(self, dataset: SampleDataset) -> MicroBatchPlan:
        """Return which samples share a forward pass."""
        assert isinstance(self.config, SFTConfig) and isinstance(dataset, TokenDataset)
        return plan_micro_batches(self.config.data, dataset.lengths, self.packs, self.attention_share)

    @cached_property
    def attention_share(self) -> float:
        """`MicroBatchPlan.quadratic` of the model.

        Read once, on all ranks together: validation must not depend on the model's directory, and if only one rank
        failed, the others would wait in the forward pass.
        """
        config = self.config
        return on_every_rank(lambda: attention_share(load_model_config(config).get_text_config().hidden_size))

    def build_model(self) -> PreTrainedModel:
        """Also test whether the model supports packing and the fused loss."""
        model, recorded = self.build_model_to_check(self.prepare_loss)
        self.model = model
        assert isinstance(self.train_dataset, TokenDataset)
        sync_eos_token(model, self.tokenizer, self.train_dataset.final_tokens(), self.is_main)
        self.reshard_policy = FSDPReshardPolicy.of_config(
            self.config.model.fsdp_config, model, self.precision, self.device_name
        )
        with torch.compiler.set_stance("force_eager"):  # compiled graphs for these few samples would not be reused
            self.check_forward(model, recorded)
        return model

    def prepare_loss(self, model: PreTrainedModel) -> None:
        """Replace the output layer and compile the blocks, which must happen before the model is sharded."""
        config, head = self.config, None
        compiles = isinstance(config, SFTConfig) and config.model.compile
        if config.model.fused_loss and config.sequence_parallel_size == 1:
            by_liger = config.model.use_liger and self.device_name == "cuda"
            head = install_fused_loss(model, by_liger, compiles and self.device_name == "cuda")
        if compiles:
            compile_blocks(model)
        self.token_loss = TokenLoss(model, head, self.precision, self.device_name)

    def check_forward(self, model: PreTrainedModel, recorded: Mapping[str, Any] | None) -> None:
        """Fall back to padding or to the loss of the logits if the model needs it; collective.

        Args:
            recorded: result of an earlier start; None tests the model's weights.
        """
        loss, vocab_size = self.token_loss, model.config.get_text_config().vocab_size
        model.eval()
        if self.packs:
            self.pack_if_possible(model, recorded)
        if loss.head is not None:
            if recorded is None:
                micro_batch = self.collator.micro_batch(trial_samples(vocab_size)[:1])
                error = fused_loss_error(loss.logits, loss, micro_batch)
            else:
                error = recorded["fused_loss_error"]
            self.forward_check["fused_loss_error"] = error
            if not error < LOSS_TOLERANCE[loss.precision]:
                loss.head = None
                if self.is_main:
                    warn(
                        f"model.fused_loss is disabled because it differs by {error:.2g} from the unfused loss on this "
                        "model, so all logits are materialized; set model.fused_loss=false to silence this warning"
                    )
        self.reshard_policy.reshard()

    def pack_if_possible(self, model: PreTrainedModel, recorded: Mapping[str, Any] | None) -> None:
        """Fall back to padding if the model cannot keep packed samples apart; collective.

        The result depends on the initial weights only: a resumed run reads it from its checkpoint or tests the
        pretrained weights, so it packs if it packed before. The order of the data does not depend on it.

        Raises:
            UserError: see `enable_packing`.
        """
        required = isinstance(self.config, SFTConfig) and self.config.data.packing is True
        logits_of, max_length = self.token_loss.logits, self.config.data.max_length
        reason = enable_packing(model, logits_of, self.precision, max_length, recorded, required)
        self.forward_check["why_not_packed"] = reason
        if reason is not None:
            self.packs, position = False, self.train_sampler.state_dict()
            self.build_batches()
            self.train_sampler.load_state_dict(position)

    # One step

    def training_step(self, batch: Any) -> Metrics:
        """Run one optimizer step; see `PipelineTrainer.training_step`.

        Without any loss token, it makes no update and has no loss, perplexity or gradient norm.
        """
        lr, micro_batches = self.lr_scheduler.get_last_lr()[0], self.to_micro_batches(batch)
        self.model.train()
        with self.timer.measure("forward_backward"):
            mean, num_loss_tokens = self.forward_backward(micro_batches)
        metrics: Metrics = {"train/lr(1e-3)": lr * 1e3}
        with self.timer.measure("optimizer"):
            if num_loss_tokens:
                loss, grad_norm = self.optimizer_step(mean)
                metrics = {"train/loss": loss, **metrics, "train/grad_norm": grad_norm}
                metrics["train/perplexity"] = perplexity(loss)
            else:
                self.skip_update()
        return {
            **metrics,
            "train/num_loss_tokens": num_loss_tokens,
            "train/epoch": self.epoch_of_step,
            "train/skipped_steps": self.guard.num_skipped,
            **self.step_costs(micro_batches),
        }

    def to_micro_batches(self, batch: Any) -> TokenBatch:
        """Convert the collator's batch to tensors."""
        return batch

    def forward_backward(self, batch: TokenBatch) -> tuple[torch.Tensor, float]:
        """Accumulate the gradient of the global mean over all micro-batches and ranks.

        FSDP averages gradients over ranks, so each rank's sum is scaled by ranks / tokens of the global batch.

        Returns:
            The mean loss, a scalar that a GPU may still be computing, and the number of loss tokens in the global
            batch; both are the same on every rank.
        """
        num_loss_tokens = self.sum_over_data_ranks(batch.num_loss_tokens)
        num_tokens = max(num_loss_tokens, 1.0)
        total = torch.zeros((), dtype=torch.float64, device=self.device_name)
        with self.sequence_parallelism():  # also around the backward pass, where checkpointed layers run forward again
            for number, micro_batch in enumerate(batch.micro_batches):
                self.before_micro_batch(is_last=number == len(batch.micro_batches) - 1)
                with self.partial_model(number):
                    loss = self.summed_loss(micro_batch)
                    (loss * (self.dp_size / num_tokens)).backward()
                total += loss.detach()
        dist.all_reduce(total)
        return total / (num_tokens * self.config.sequence_parallel_size), num_loss_tokens

    def partial_model(self, number: int) -> AbstractContextManager[None]:
        """Return a context that selects the part of the model to run for micro-batch `number`; here the full model."""
        return nullcontext()

    def sequence_parallelism(self) -> AbstractContextManager:
        """Return a context that splits attention over the ranks that share a sequence, if any."""
        return self.sharding_manager if self.config.sequence_parallel_size > 1 else nullcontext()

    def summed_loss(self, micro_batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the summed cross-entropy of a micro-batch's loss tokens, a scalar with gradient."""
        if self.config.sequence_parallel_size == 1:
            return self.token_loss(micro_batch)
        # With the sequence split by Ulysses, the mean of verl's forward pass is converted to a sum.
        tensors = {name: tensor.to(self.device_name) for name, tensor in micro_batch.items()}
        num_tokens = tensors["loss_mask"][:, 1:].sum()
        if isinstance(self.config, SFTConfig) and self.config.data.balance_dp_token:  # verl's mean differs then
            dist.all_reduce(num_tokens)
            num_tokens = num_tokens / self.dp_size
        return self._compute_loss_and_backward(tensors, do_backward=False) * num_tokens

    def sum_over_data_ranks(self, value: float) -> float:
        """Sum over data-parallel ranks; the ranks of a sequence-parallel group have the same samples.

        Reduces on the CPU, where the value is, so that nothing waits for a GPU.
        """
        reduced = reduce_over_ranks(sums={"value": value})["value"]
        return reduced / self.config.sequence_parallel_size

    def step_costs(self, batch: TokenBatch) -> Metrics:
        """Return time and memory of the step: seconds of the slowest rank, throughput of all ranks."""
        seconds = self.step_seconds()
        compute = seconds["time/train/forward_backward_s"] + seconds["time/train/optimizer_s"]
        mfu = self.mfu(batch, seconds["time/train/step_s"])
        reduced = reduce_over_ranks(
            sums={"tokens": sum(batch.lengths), "samples": len(batch.rows), **mfu},
            maxima={**seconds, "train/time(s)": compute, **peak_memory(self.device_name)},
        )
        copies = self.config.sequence_parallel_size  # of each sample
        step_s = reduced["time/train/step_s"]
        reduced["throughput/train/tokens_per_s"] = reduced.pop("tokens") / copies / step_s
        reduced["throughput/train/samples_per_s"] = reduced.pop("samples") / copies / step_s
        if "mfu" in reduced:
            reduced["throughput/train/mfu"] = reduced.pop("mfu") / (self.dp_size * copies) / copies
        return reduced

    def mfu(self, batch: TokenBatch, seconds: float) -> Metrics:
        """Return this rank's fraction of the GPU's peak by verl's count; empty on CPUs, whose peak verl guesses."""
        if self.device_name != "cuda":
            return {}
        achieved, peak = self.flops_counter.estimate_flops(batch.lengths, seconds)
        return {"mfu": achieved / peak}

    @cached_property
    def flops_counter(self) -> FlopsCounter:
        """verl's counter of a model's FLOPs."""
        return FlopsCounter(self.model_config)

    # Validation

    @torch.no_grad()
    def validate(self) -> Metrics:
        """Return the token-weighted loss over the whole validation set; it does not depend on the number of ranks."""
        if self.val_dataset is None:
            return {}
        start = time.perf_counter()
        self.model.eval()
        try:
            mean, num_loss_tokens = self.mean_loss(self.val_dataset, self.val_assignment)
        finally:
            self.reshard_policy.reshard()
        return {
            "val/loss": mean,
            "val/perplexity": perplexity(mean),
            "val/num_loss_tokens": num_loss_tokens,
            "time/val/step_s": time.perf_counter() - start,
        }

    @cached_property
    def val_assignment(self) -> RankMicroBatches:
        """The samples of each micro-batch of the validation set; large sets take seconds to assign."""
        assert self.val_dataset is not None
        return self.validation_plan(self.val_dataset).assign(range(len(self.val_dataset)), self.dp_size)

    def mean_loss(self, dataset: SampleDataset, assigned: RankMicroBatches) -> tuple[float, float]:
        """Return the cross-entropy in nats per loss token and the number of loss tokens; the same on every rank."""
        total, num_tokens = torch.zeros((), dtype=torch.float64, device=self.device_name), 0
        for micro_batch in validation_micro_batches(dataset, assigned, self.collator.micro_batch, self.dp_rank):
            self.stop_vote.raise_if_stopping(self.checkpoint_manager.is_writing)
            num_tokens += int(micro_batch["loss_mask"][:, 1:].sum())
            total += self.summed_loss(micro_batch)
        num_loss_tokens = self.sum_over_data_ranks(num_tokens)
        return self.sum_over_data_ranks(float(total)) / num_loss_tokens, num_loss_tokens

    @torch.no_grad()
    def validation_step(self, batch: Any) -> torch.Tensor:
        """Return the mean cross-entropy of one batch in nats per loss token, a scalar; collective.

        Unlike `validate`, which weights every token of the validation set equally, it averages this batch only, like
        verl.

        Args:
            batch: a mapping with `input_ids`, `attention_mask` and `loss_mask`, each (batch, seq), right-padded.
        """
        masks = batch["attention_mask"].bool()
        tokens = zip(batch["input_ids"], batch["loss_mask"], masks)
        samples = [{"input_ids": ids[mask], "loss_mask": loss_mask[mask]} for ids, loss_mask, mask in tokens]
        return self.validation_loss(self.collator.micro_batch(samples))

    def validation_loss(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the mean cross-entropy of a micro-batch in nats per loss token, a scalar; collective."""
        self.model.eval()
        with self.sequence_parallelism():
            loss = self.summed_loss(micro_batch)
        self.reshard_policy.reshard()
        return loss / micro_batch["loss_mask"][:, 1:].sum().clamp(min=1)


def perplexity(loss: float) -> float:
    """Return exp(loss); infinite if it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
