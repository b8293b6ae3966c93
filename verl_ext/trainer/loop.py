"""The loop that every stage shares: resume, step, validate, save, stop when asked, and a record of all of it."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase
from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_
from verl.workers.sharding_manager.fsdp_ulysses import FSDPUlyssesShardingManager

from verl_ext.console import warn
from verl_ext.data.dataset import SampleDataset
from verl_ext.deadline import deadline_from_environment, parse_deadline
from verl_ext.errors import Stop, UserError
from verl_ext.files import GIB, free_bytes
from verl_ext.metrics.timers import StepTimer
from verl_ext.metrics.trace import Trace
from verl_ext.trainer.attempt import Attempt
from verl_ext.trainer.guard import NonFiniteGuard
from verl_ext.trainer.hardware import settle_precision
from verl_ext.trainer.preemption import Preemption
from verl_ext.trainer.setup import TrainerSetup
from verl_ext.trainer.stages import RunConfig
from verl_ext.trainer.stop_signals import RankSignals

Metrics = dict[str, float]


class PipelineTrainer(TrainerSetup, ABC):
    """verl's trainer with exact resume, committed checkpoints and every step on record.

    A stage says what a step and a validation are, by `training_step` and `validate`; all else is here.

    Args:
        config: the resolved configuration, with `trainer.device` settled.
        device_mesh: one-dimensional mesh over all ranks, for FSDP2.
        ulysses_device_mesh: mesh with dimensions dp and sp.
        tokenizer: with a chat template.
        train_dataset: samples of `input_ids`, `loss_mask` and `row`.
        val_dataset: the same, or None for a run without validation.
        signals: what this rank is asked; None for a process whose signals are someone else's.
    """

    def __init__(
        self,
        config: RunConfig,
        device_mesh: DeviceMesh,
        ulysses_device_mesh: DeviceMesh,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: SampleDataset,
        val_dataset: SampleDataset | None,
        signals: RankSignals | None = None,
    ) -> None:
        self.recorded_config = config
        self.device_name = config.trainer.device
        self.is_main = device_mesh.get_rank() == 0
        self.run_dir = Path(config.trainer.default_local_dir)
        self.trace = Trace(self.run_dir, device_mesh.get_rank()) if config.trainer.trace else None
        self.timer = StepTimer(
            on_gpu=self.device_name == "cuda", on_part=None if self.trace is None else self.trace.part
        )
        self.guard = NonFiniteGuard(config.trainer.max_nonfinite_steps, train_dataset.describe)
        self.preemption = Preemption(signals, self.deadline(config), list(config.health.stop_on))
        # verl's constructor does not run: it refuses data.chat_template and divides the batch size in the configuration
        self.config = deepcopy(config)
        precision: Any = settle_precision(config, self.device_name)
        self.config.model.mixed_precision = precision
        self.device_mesh, self.ulysses_device_mesh, self.tokenizer = device_mesh, ulysses_device_mesh, tokenizer
        self.dp_size, self.dp_rank = ulysses_device_mesh.size(0), ulysses_device_mesh.get_local_rank("dp")
        # what verl's forward pass under Ulysses reads
        self.sharding_manager = FSDPUlyssesShardingManager(ulysses_device_mesh)
        self.use_remove_padding = config.use_remove_padding
        self.resume_global_step = 0
        self._build_dataloader(train_dataset, val_dataset)
        self._build_model_optimizer()
        self._init_checkpoint_manager()
        self.load_checkpoint()
        self.global_step = self.saved_step = self.resume_global_step
        self.preemption.expected_save_s = self.checkpoint_manager.expected_save_s()
        self.step_metrics: Metrics = {}

    def deadline(self, config: RunConfig) -> float | None:
        """When this machine goes away, by the configuration or by the environment; rank 0 alone warns."""
        from_environment = deadline_from_environment(warn if self.is_main else lambda sentence: None)
        known = [parse_deadline(config.trainer.preemption.deadline), from_environment]
        return min((moment for moment in known if moment is not None), default=None)

    # What a stage defines

    @abstractmethod
    def training_step(self, batch: Any) -> Metrics:
        """Update the model once; the metrics are reduced over all ranks.

        Args:
            batch: what the stage's batcher makes, with the `rows` that are in it.
        """

    @abstractmethod
    def validate(self) -> Metrics:
        """Measure the model on the whole validation set; empty when there is none.

        Calls `preemption.check` now and then, so that a long validation does not hold up a stop.
        """

    # The loop

    def fit(self) -> None:
        """Train from the resumed step to the last, recording every step.

        Raises:
            Stop: the run was asked to stop; everything is saved.
        """
        self.preemption.hold()
        steps = self.global_step, self.total_training_steps, self.steps_per_epoch
        self.attempt = Attempt(
            self.recorded_config, *steps, dist.get_world_size(), self.is_main, self.config.model.mixed_precision
        )
        with self.attempt:
            try:
                self.train()
            except Stop:
                if self.global_step > self.saved_step:
                    self.save()
                self.finish_writing()
                raise
            except BaseException:
                self.finish_writing_in_spite_of_failure()
                raise
            self.finish_writing()

    def train(self) -> None:
        """The steps from the current one to the last, with what is due after each."""
        self.preemption.check()
        if self.owes_validation or (self.global_step == 0 and self.config.trainer.val_before_train):
            self.run_validation()
        for batch in self.remaining_batches():
            self.step_metrics = {}
            self.log(self.training_step(batch))
            if self.trace is not None:
                self.trace.part("step", self.step_start, time.perf_counter(), step=self.global_step)
            self.preemption.note(step_s=time.perf_counter() - self.step_start)
            self.guard.check(self.global_step, batch.rows)
            self.train_sampler.advance()
            if self.is_due(self.config.trainer.test_freq):
                self.run_validation()
            if self.is_due(self.config.trainer.save_freq):
                self.save()
            self.preemption.sick_by = self.attempt.stop_rule
            if self.steps_left and not self.preemption.check(self.checkpoint_manager.is_writing):
                self.finish_writing()

    def remaining_batches(self) -> Iterator[Any]:
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

    def log(self, metrics: Metrics) -> None:
        """Record metrics of the current step; the checkpoint of this step will hold them too."""
        self.step_metrics.update(metrics)
        self.attempt.log(self.global_step, metrics)

    def run_validation(self) -> None:
        """Validate; a stop in between leaves the validation to the next start."""
        self.owes_validation = True
        metrics = self.validate()
        self.owes_validation = False
        self.log(metrics)

    def optimizer_step(self, loss: float | torch.Tensor) -> tuple[float, float]:
        """Clip, update and move the learning rate on; skip all of it when loss or gradient is not finite.

        Both are read together: it is the one time in a step that a GPU is waited for.

        Args:
            loss: of this step, the same on every rank.

        Returns:
            The loss, and the gradient's norm before clipping.
        """
        norm = fsdp2_clip_grad_norm_(self.fsdp_model.parameters(), max_norm=self.config.optim.clip_grad)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        both = torch.stack([torch.as_tensor(loss, device=norm.device).double(), norm.double()]).tolist()
        finite = all(map(math.isfinite, both))
        if finite:
            self.optimizer.step()
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        self.guard.count(finite)
        return both[0], both[1]

    # Saving

    def save(self) -> None:
        """Save the current step and record how long training waited for it."""
        start = time.perf_counter()
        self.finish_writing()
        self.checkpoint_manager.step_metrics = {
            name: value
            for name, value in self.step_metrics.items()
            if name.startswith(("train/", "val/", "eval/")) and math.isfinite(value)
        }
        self.save_checkpoint(self.global_step)
        self.saved_step = self.global_step
        self.log({"time/train/save_s": time.perf_counter() - start})

    def finish_writing(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and record how long it took."""
        seconds = self.checkpoint_manager.wait()
        if seconds is not None:
            self.preemption.note(save_s=seconds)
            free = free_bytes(self.run_dir) / GIB
            self.attempt.log(self.saved_step, {"time/checkpoint/write_s": seconds, "system/disk_free_gib": free})

    def finish_writing_in_spite_of_failure(self) -> None:
        """`finish_writing` after the training has failed, which is what the user is to be told then: a warning more."""
        try:
            self.finish_writing()
        except UserError as error:
            warn(str(error))
