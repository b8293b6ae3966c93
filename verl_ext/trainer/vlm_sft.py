"""Fine-tuning of a vision-language model, a part of which is left out at random, so that it can do without any."""

from __future__ import annotations

import random
import sys
from contextlib import AbstractContextManager

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, ProcessorMixin

from verl_ext.controller.adapters.registry import adapter_of
from verl_ext.controller.configuration import Configuration
from verl_ext.data.batching import TokenBatch
from verl_ext.data.dataset import SampleDataset
from verl_ext.data.image_chats import ImageChatBatch, ImageChatCollator, ImageChatDataset
from verl_ext.data.packing import MicroBatchPlan
from verl_ext.distributed import on_every_rank
from verl_ext.errors import UserError, first_line_of
from verl_ext.metrics.run_record import RunRecord
from verl_ext.remote_code import require_no_remote_code
from verl_ext.trainer.loop import Metrics
from verl_ext.trainer.model import load_model, local_model_path, shard
from verl_ext.trainer.optimizer import build_optimizer, build_scheduler
from verl_ext.trainer.sft import SFTTrainer
from verl_ext.trainer.stages import VLMSFTConfig


def load_processor(config: VLMSFTConfig) -> ProcessorMixin:
    """The model's processor.

    Raises:
        UserError: it cannot be loaded, or is of a family whose chats cannot be made here.
    """
    path = local_model_path(config)
    require_no_remote_code(path, config.model.trust_remote_code)
    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except Exception as error:  # each part of a damaged checkpoint raises an exception of its own kind
        raise UserError(
            f"the processor of {path} cannot be loaded ({first_line_of(error)}); give a whole model's directory"
        ) from error
    if not hasattr(processor, "image_token") or not hasattr(processor.image_processor, "merge_size"):
        raise UserError(f"{path} has a {type(processor).__name__}; the stage vlm_sft trains models of the Qwen family")
    return processor


class VLMSFTTrainer(SFTTrainer):
    """Trains on chats about images; a share of the micro-batches runs a configuration that is drawn evenly."""

    config: VLMSFTConfig
    batcher: ImageChatCollator

    def make_batcher(self) -> ImageChatCollator:
        """See `TrainerSetup.make_batcher`."""
        config, section = self.config, self.config.configurations
        self.processing_class = self.processor = on_every_rank(lambda: load_processor(config))
        batcher = ImageChatCollator(
            self.processor,
            config.data.micro_batch_size_per_gpu,
            tuple(section.tier_sizes),
            self.tokenizer.eos_token_id,
            on_every_rank(RunRecord(self.run_dir).first_start),
        )
        datasets = [each for each in (self.train_dataset, self.val_dataset) if isinstance(each, ImageChatDataset)]
        chats = [chat for dataset in datasets for chat in dataset.chats[self.dp_rank :: self.dp_size]]
        on_every_rank(lambda: batcher.check(chats))
        return batcher

    def _build_model_optimizer(self) -> None:
        config, section = self.config, self.config.configurations
        model = on_every_rank(
            lambda: load_model(config, self.device_mesh, self.device_name, AutoModelForImageTextToText)
        )
        self.adapter = adapter_of(model, self.processor, tuple(section.tier_sizes))
        self.space = self.adapter.space(section.min_active, len(self.adapter.blocks), list(section.topk_choices))
        self.prepare_loss(model)
        self.model = self.fsdp_model = shard(model, config, self.device_mesh, self.device_name)
        self.model_config = model.config
        self.optimizer = build_optimizer(self.fsdp_model, config.optim)
        self.lr_scheduler = build_scheduler(self.optimizer, config.optim, self.total_steps)
        self.gather_as_asked()

    def plan_for(self, dataset: SampleDataset) -> None:
        """See `TrainerSetup.plan_for`: chats are grouped in the order they come."""

    def validation_plan(self, dataset: SampleDataset) -> MicroBatchPlan:
        """See `SFTTrainer.validation_plan`: chats with as many questions together."""
        size = self.config.data.micro_batch_size_per_gpu
        assert isinstance(dataset, ImageChatDataset)
        return MicroBatchPlan(dataset.lengths, False, sys.maxsize, size)

    def tensors_of(self, batch: ImageChatBatch) -> TokenBatch:
        """See `SFTTrainer.tensors_of`: of each group at its tier."""
        with self.timer.measure("data"):
            made = [self.batcher.at(group, self.tier(number)) for number, group in enumerate(batch.groups)]
        return TokenBatch(made, batch.rows)

    def what_runs(self, number: int) -> AbstractContextManager[None]:
        """See `SFTTrainer.what_runs`: the same on every rank, for each gathers a block's weights from all."""
        return self.adapter.configured(self.configuration(number))

    def tier(self, number: int) -> int:
        """Of a micro-batch of this step, the same on every rank, so that none waits for another."""
        section, tiers = self.config.configurations, range(len(self.config.configurations.tier_sizes))
        drawn = self.draws("tier", number).choices(tiers, list(section.tier_weights))[0]
        return 0 if self.global_step <= section.lowest_tier_steps else drawn

    def configuration(self, number: int) -> Configuration:
        """Of a micro-batch of this step, without regard to its tier."""
        section, rng = self.config.configurations, self.draws("configuration", number)
        if self.global_step <= section.whole_model_steps or rng.random() >= section.share:
            return self.space.full
        return self.space.draw(rng)

    def draws(self, what: str, number: int) -> random.Random:
        """Random numbers of a micro-batch of this step, the same in every attempt."""
        return random.Random(f"{self.config.trainer.seed} {self.global_step} {number} {what}")

    @torch.no_grad()
    def validate(self) -> Metrics:
        """See `SFTTrainer.validate`: all of the model, at the highest tier."""
        with self.adapter.configured(self.space.full):
            return super().validate()
