"""The loop that every stage shares: resume, step, validate, save, and a record of all of it."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase
from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer
from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_

from verl_ext.checkpoint.layout import step_of
from verl_ext.checkpoint.manager import CheckpointManager
from verl_ext.config.digest import config_digest
from verl_ext.data.batching import Batch, MicroBatcher
from verl_ext.data.sampler import GlobalBatchSampler
from verl_ext.metrics.notice import warn
from verl_ext.metrics.timers import StepTimer
from verl_ext.trainer.attempt import Attempt
from verl_ext.trainer.distributed import on_rank_zero
from verl_ext.trainer.guard import NonFiniteGuard
from verl_ext.trainer.model import build_model
from verl_ext.trainer.optimizer import build_optimizer, build_scheduler
from verl_ext.trainer.resume import checkpoint_to_resume

Metrics = dict[str, float]


def verls_config(config: DictConfig) -> DictConfig:
    """A copy for verl's constructor, which refuses some settings and writes into others."""
    copy = OmegaConf.create(OmegaConf.to_container(config))
    copy.data.chat_template = None  # the tokenizer carries it by now
    # With sequence parallelism verl computes the micro-batch's loss; it must be the plain mean, weighted by us.
    copy.data.balance_dp_token = False
    return copy


class PipelineTrainer(FSDPSFTTrainer, ABC):
    """verl's trainer with exact resume, committed checkpoints and every step on record.

    A stage says what a step and a validation are, by `training_step` and `validate`; all else is here.

    Args:
        config: the resolved configuration, with `trainer.device` settled.
        device_mesh: one-dimensional mesh over all ranks, for FSDP2.
        ulysses_device_mesh: mesh with dimensions dp and sp.
        tokenizer: with a chat template.
        train_dataset: samples of `input_ids`, `loss_mask` and `row`.
        val_dataset: the same, or None for a run without validation.
    """

    def __init__(
        self,
        config: DictConfig,
        device_mesh: DeviceMesh,
        ulysses_device_mesh: DeviceMesh,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: Dataset,
        val_dataset: Dataset | None,
    ) -> None:
        self.recorded_config = config
        self.device_name = config.trainer.device
        self.is_main = device_mesh.get_rank() == 0
        self.run_dir = Path(config.trainer.default_local_dir)
        self.timer = StepTimer(synchronize="cuda" if self.device_name == "cuda" else None)
        self.guard = NonFiniteGuard(config.trainer.max_nonfinite_steps, train_dataset.describe)
        with open(os.devnull, "w") as sink, redirect_stdout(sink):  # verl prints the whole configuration and more
            copy = verls_config(config)
            super().__init__(copy, device_mesh, ulysses_device_mesh, tokenizer, train_dataset, val_dataset)
        self.global_step = self.resume_global_step

    # What a stage defines

    @abstractmethod
    def training_step(self, batch: Batch) -> Metrics:
        """Update the model once; the metrics are reduced over all ranks."""

    @abstractmethod
    def validate(self) -> Metrics:
        """Measure the model on the whole validation set; empty when there is none."""

    # The loop

    def fit(self) -> None:
        """Train from the resumed step to the last, recording every step."""
        attempt = Attempt(
            self.recorded_config, self.global_step, self.total_training_steps, dist.get_world_size(), self.is_main
        )
        with attempt:
            if self.global_step == 0 and self.config.trainer.val_before_train:
                attempt.log(0, self.validate())
            for batch in self.remaining_batches():
                attempt.log(self.global_step, self.training_step(batch))
                self.guard.check(self.global_step, batch.rows)
                self.train_sampler.advance()
                if self.is_due(self.config.trainer.test_freq):
                    attempt.log(self.global_step, self.validate())
                if self.is_due(self.config.trainer.save_freq):
                    attempt.log(self.global_step, self.timed_save())

    def remaining_batches(self) -> Iterator[Batch]:
        """Batches from the current position to the last step, epoch after epoch; counts `global_step` up."""
        while self.global_step < self.total_training_steps:
            batches = iter(self.train_dataloader)
            for _ in range(min(len(self.train_sampler) - self.train_sampler.batches_done, self.steps_left)):
                self.step_start = time.perf_counter()
                with self.timer.measure("data"):
                    batch = next(batches)
                self.global_step += 1
                yield batch

    @property
    def steps_left(self) -> int:
        """Steps until the run is finished."""
        return self.total_training_steps - self.global_step

    def is_due(self, frequency: int) -> bool:
        """Whether what happens every `frequency` steps, and at the last, happens now; -1 is the last alone."""
        return self.steps_left == 0 or (frequency > 0 and self.global_step % frequency == 0)

    def optimizer_step(self, loss: float) -> float:
        """Clip, update and move the learning rate on; skip all of it when loss or gradient is not finite.

        Args:
            loss: of this step, the same on every rank.

        Returns:
            The gradient's norm before clipping.
        """
        norm = fsdp2_clip_grad_norm_(self.fsdp_model.parameters(), max_norm=self.config.optim.clip_grad)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        finite = all(map(torch.isfinite, torch.tensor([loss, grad_norm])))
        if finite:
            self.optimizer.step()
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        self.guard.count(bool(finite))
        return grad_norm

    # What verl's constructor calls

    def _normalize_config_bsz(self) -> None:
        """verl divides the batch size in the configuration; here it stays the global one, as users wrote it."""
        self.dp_size = self.ulysses_device_mesh.size(0)
        self.dp_rank = self.ulysses_device_mesh.get_local_rank("dp")

    def _build_dataloader(self, train_dataset: Dataset, val_dataset: Dataset | None) -> None:
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        data = self.config.data
        self.batcher = MicroBatcher(data.micro_batch_size_per_gpu, self.tokenizer.pad_token_id)
        self.train_sampler = GlobalBatchSampler(
            len(train_dataset), data.train_batch_size, self.dp_rank, self.dp_size, self.config.trainer.seed
        )
        self.train_dataloader = DataLoader(
            train_dataset,
            batch_sampler=self.train_sampler,
            num_workers=data.num_workers,
            collate_fn=self.batcher,
            # Its own: every iterator draws a seed, and a resumed run would draw once more from the global generator.
            generator=torch.Generator(),
        )
        self.steps_per_epoch = len(self.train_sampler)
        steps_in_epochs = self.steps_per_epoch * self.config.trainer.total_epochs
        self.total_training_steps = self.config.trainer.total_training_steps or steps_in_epochs
        # As in verl the schedule spans the epochs, so that a run ended early by total_training_steps can be prolonged.
        scheduled = self.config.optim.total_training_steps
        self.total_steps = scheduled if scheduled > 0 else max(steps_in_epochs, self.total_training_steps)

    def _build_model_optimizer(self) -> None:
        self.model = self.fsdp_model = build_model(self.config, self.device_mesh, self.device_name)
        self.model_config = self.model.config
        self.optimizer = build_optimizer(self.fsdp_model, self.config.optim)
        self.lr_scheduler = build_scheduler(self.optimizer, self.config.optim, self.total_steps)

    # Checkpoints

    def _init_checkpoint_manager(self) -> None:
        checkpoint = self.config.trainer.checkpoint
        self.checkpoint_manager = CheckpointManager(
            model=self.fsdp_model,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            processing_class=self.tokenizer,
            checkpoint_config=OmegaConf.create(OmegaConf.to_container(checkpoint)),
            export_dtype=checkpoint.export_dtype,
            config_digest=config_digest(self.recorded_config),
            warn=warn,
        )

    def load_checkpoint(self) -> int:
        """Load the checkpoint that the configuration and the disk give; returns its step, 0 for none.

        Raises:
            UserError: the checkpoint does not fit this run.
        """
        path = on_rank_zero(lambda: checkpoint_to_resume(self.config, dist.get_world_size()))
        if path is None:
            return 0
        self.resume_global_step = step_of(path) or 0
        self.checkpoint_manager.load_checkpoint(str(path))
        state = self.checkpoint_manager.load_data_state(str(path))
        self.guard.num_skipped = state.get("skipped_steps", 0)
        self.train_sampler.load_state_dict(state)
        return self.resume_global_step

    def save_checkpoint(self, step: int) -> None:
        """Commit a checkpoint of this step; collective."""
        state = {**self.train_sampler.state_dict(), "skipped_steps": self.guard.num_skipped}
        self.checkpoint_manager.data_state = state
        self.checkpoint_manager.save_checkpoint(
            local_path=str(self.run_dir / f"global_step_{step}"),
            global_step=step,
            max_ckpt_to_keep=self.config.trainer.max_ckpt_to_keep,
        )

    def timed_save(self) -> Metrics:
        """Save and say how long the step waited for it."""
        start = time.perf_counter()
        self.save_checkpoint(self.global_step)
        return {"time/train/save_s": time.perf_counter() - start}
