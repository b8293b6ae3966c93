"""Fine-tuning of a vision-language model with randomly skipped parts, so that it works without any of them."""

from __future__ import annotations

import random
import sys
from contextlib import AbstractContextManager

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin

from verl_ext.controller.adapters import adapter_for
from verl_ext.controller.space import Configuration
from verl_ext.data.batching import MicroBatch, MicroBatchPlan, TokenBatch
from verl_ext.data.dataset import SampleDataset
from verl_ext.data.image_chats import ImageChatBatch, ImageChatCollator, ImageChatDataset
from verl_ext.distributed import on_every_rank
from verl_ext.errors import UserError, first_line_of
from verl_ext.metrics.run_record import RunRecord
from verl_ext.model_files import require_no_remote_code
from verl_ext.trainer.fsdp import FSDPReshardPolicy, shard
from verl_ext.trainer.model import load_model, local_model_path
from verl_ext.trainer.sft import SFTTrainer
from verl_ext.trainer.stages import VLMSFTConfig
from verl_ext.trainer.trainer import Metrics


def load_processor(config: VLMSFTConfig) -> ProcessorMixin:
    """Load the model's processor.

    Raises:
        UserError: the processor cannot be loaded, or its family is not supported.
    """
    path = local_model_path(config)
    require_no_remote_code(path, config.model.trust_remote_code)
    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except Exception as error:  # damaged checkpoints may raise anything
        raise UserError(
            f"the processor of {path} cannot be loaded ({first_line_of(error)}); specify a complete model directory"
        ) from error
    if not hasattr(processor, "image_token") or not hasattr(processor.image_processor, "merge_size"):
        raise UserError(f"{path} has a {type(processor).__name__}; the stage vlm_sft trains models of the Qwen family")
    return processor


class VLMSFTTrainer(SFTTrainer):
    """Trains on chats about images; a fraction of the micro-batches uses a uniformly sampled configuration."""

    config: VLMSFTConfig
    collator: ImageChatCollator

    def build_collator(self) -> ImageChatCollator:
        config, section = self.config, self.config.configurations
        self.processing_class = self.processor = on_every_rank(lambda: load_processor(config))
        collator = ImageChatCollator(
            self.processor,
            config.data.micro_batch_size_per_gpu,
            tuple(section.tier_sizes),
            self.tokenizer.eos_token_id,
            on_every_rank(RunRecord(self.run_dir).first_start),
        )
        datasets = [each for each in (self.train_dataset, self.val_dataset) if isinstance(each, ImageChatDataset)]
        chats = [chat for dataset in datasets for chat in dataset.chats[self.dp_rank :: self.dp_size]]
        on_every_rank(lambda: collator.check(chats))
        return collator

    def build_model(self) -> PreTrainedModel:
        config, section = self.config, self.config.configurations
        model = on_every_rank(lambda: load_model(config, self.device_mesh, self.precision, AutoModelForImageTextToText))
        self.adapter = adapter_for(model, self.processor, tuple(section.tier_sizes), section="configurations")
        self.space = self.adapter.space(section.min_active, None, list(section.topk_choices), "configurations")
        self.prepare_loss(model)
        fsdp = config.model.fsdp_config
        model = shard(model, fsdp, self.device_mesh, self.precision)
        self.reshard_policy = FSDPReshardPolicy.of_config(fsdp, model, self.precision, self.device_name)
        return model

    def training_plan(self, dataset: SampleDataset) -> None:
        """Chats are grouped in the order of the data."""

    def validation_plan(self, dataset: SampleDataset) -> MicroBatchPlan:
        """Chats with similar numbers of questions share a micro-batch."""
        size = self.config.data.micro_batch_size_per_gpu
        assert isinstance(dataset, ImageChatDataset)
        return MicroBatchPlan(dataset.lengths, False, sys.maxsize, size)

    def to_micro_batches(self, batch: ImageChatBatch) -> TokenBatch:
        """Prepare each group at its tier."""
        with self.timer.measure("data"):
            micro_batches = [self.collator.at(group, self.tier(number)) for number, group in enumerate(batch.groups)]
        return TokenBatch(micro_batches, batch.rows)

    def partial_model(self, number: int) -> AbstractContextManager[None]:
        """Select the same blocks on every rank, because ranks gather a block's weights together."""
        return self.adapter.configured(self.configuration(number))

    @torch.no_grad()
    def validation_step(self, batch: MicroBatch) -> torch.Tensor:
        """Run the full model on a micro-batch of the collator, with images."""
        with self.adapter.configured(self.space.full):
            return self.validation_loss(batch)

    def tier(self, number: int) -> int:
        """Return the tier of a micro-batch of this step, the same on every rank, so that no rank waits for another."""
        section, tiers = self.config.configurations, range(len(self.config.configurations.tier_sizes))
        tier = self.step_rng("tier", number).choices(tiers, list(section.tier_weights))[0]
        return 0 if self.global_step <= section.lowest_tier_steps else tier

    def configuration(self, number: int) -> Configuration:
        """Return the configuration of a micro-batch of this step, independent of its tier."""
        section, rng = self.config.configurations, self.step_rng("configuration", number)
        if self.global_step <= section.full_model_steps or rng.random() >= section.share:
            return self.space.full
        return self.space.sample(rng)

    def step_rng(self, what: str, number: int) -> random.Random:
        """Return random numbers for a micro-batch of this step, the same in a resumed run."""
        return random.Random(f"{self.config.trainer.seed} {self.global_step} {number} {what}")

    @torch.no_grad()
    def validate(self) -> Metrics:
        """Validate the full model, at the highest tier."""
        with self.adapter.configured(self.space.full):
            return super().validate()
