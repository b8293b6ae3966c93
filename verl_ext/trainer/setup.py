"""The parts of a trainer: model, optimizer, data and checkpoints, built so that a run resumes exactly."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer

from verl_ext.checkpoint.layout import step_of
from verl_ext.checkpoint.manager import CheckpointManager
from verl_ext.checkpoint.options import SaveOptions
from verl_ext.checkpoint.resume import optimizer_name
from verl_ext.checkpoint.stock import is_stock
from verl_ext.config.run_config import config_digest
from verl_ext.config.schema import as_dict
from verl_ext.console import warn
from verl_ext.data.batching import Prefetcher
from verl_ext.data.dataset import SampleDataset, training_data_digest
from verl_ext.data.packing import MicroBatchPlan
from verl_ext.data.sampler import GlobalBatchSampler
from verl_ext.distributed import COLLECTIVE_TIMEOUT, on_every_rank, on_rank_zero
from verl_ext.metrics.startup import startup
from verl_ext.trainer.guard import NonFiniteGuard
from verl_ext.trainer.hardware import pick_precision
from verl_ext.trainer.model import build_model
from verl_ext.trainer.optimizer import build_optimizer, build_scheduler
from verl_ext.trainer.resume import checkpoint_to_resume, contents_to_resume, data_state_after_verl
from verl_ext.trainer.stages import RunConfig
from verl_ext.trainer.stop_signals import ignore_stop_signals
from verl_ext.trainer.tokenizer import tokenizer_of_exports


class TrainerSetup(FSDPSFTTrainer):
    """verl's trainer with the parts of this pipeline; `PipelineTrainer` adds the loop.

    Attributes:
        recorded_config: the configuration as the user gave it.
        owes_validation: whether the run stopped before the validation of the step it goes on from.
        data_digest: identifies the training data; empty if it cannot be computed.
    """

    config: RunConfig
    recorded_config: RunConfig
    guard: NonFiniteGuard
    dp_size: int
    dp_rank: int
    owes_validation: bool
    data_digest: str
    train_dataset: SampleDataset
    val_dataset: SampleDataset | None
    fsdp_model: Any
    checkpoint_manager: CheckpointManager
    train_sampler: GlobalBatchSampler  # type: ignore[assignment]  # verl makes another, in what is overridden here

    @property
    def updates_per_step(self) -> int:
        """How often the optimizer, and with it the schedule of the learning rate, goes on in one step."""
        return 1

    def _build_dataloader(self, train_dataset: SampleDataset, val_dataset: SampleDataset | None) -> None:
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        data = self.config.data
        self.batcher = self.make_batcher()
        plan = self.plan_for(train_dataset)
        self.train_sampler = GlobalBatchSampler(
            len(train_dataset), data.train_batch_size, self.dp_rank, self.dp_size, self.config.trainer.seed, plan
        )
        loader = DataLoader(
            train_dataset,
            batch_sampler=self.train_sampler,
            num_workers=data.num_workers,
            collate_fn=self.batcher,
            worker_init_fn=ignore_stop_signals,
            # Its own: every iterator draws a seed, and a resumed run would draw once more from the global generator.
            generator=torch.Generator(),
        )
        self.train_dataloader = loader if data.num_workers else Prefetcher(loader)
        self.steps_per_epoch = len(self.train_sampler)
        steps_in_epochs = self.steps_per_epoch * self.config.trainer.total_epochs
        self.total_training_steps = self.config.trainer.total_training_steps or steps_in_epochs
        # As in verl the schedule spans the epochs, so that a run ended early by total_training_steps can be prolonged.
        scheduled = self.config.optim.total_training_steps
        self.total_steps = scheduled if scheduled > 0 else max(steps_in_epochs, self.total_training_steps)
        self.total_steps *= self.updates_per_step

    @cached_property
    def processing_class(self) -> ProcessorMixin | PreTrainedTokenizerBase:
        """What exports have beside the model."""
        config, tokenizer, tells = self.recorded_config, self.tokenizer, self.device_mesh.get_rank() == 0
        return on_every_rank(lambda: tokenizer_of_exports(config, tokenizer, tells))

    @abstractmethod
    def make_batcher(self) -> Callable[[list[Any]], Any]:
        """What makes one rank's batch of a step: of its samples, or of the groups of them that `plan_for` makes."""

    def plan_for(self, dataset: SampleDataset) -> MicroBatchPlan | None:
        """Which samples share a micro-batch and on which rank; None leaves it to the batcher."""
        return None

    def make_model(self) -> PreTrainedModel:
        """The model that is trained, sharded."""
        return build_model(self.config, self.device_mesh, self.device_name)

    def _build_model_optimizer(self) -> None:
        self.model = self.fsdp_model = self.make_model()
        self.model_config = self.model.config
        self.optimizer = build_optimizer(self.fsdp_model, self.config.optim)
        self.lr_scheduler = build_scheduler(self.optimizer, self.config.optim, self.total_steps, self.updates_per_step)

    def _init_checkpoint_manager(self) -> None:
        startup.mark("model")
        trainer = self.config.trainer
        digest = config_digest(as_dict(self.recorded_config))
        precision = pick_precision(self.config.model.mixed_precision, self.device_name)
        optimizer = optimizer_name(self.config.optim)
        self.checkpoint_manager = CheckpointManager(
            model=self.fsdp_model,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            processing_class=self.processing_class,
            checkpoint_config=OmegaConf.create(as_dict(trainer.checkpoint)),
            options=SaveOptions.of(
                trainer, precision, self.total_training_steps, digest, COLLECTIVE_TIMEOUT, optimizer
            ),
            stream=self.dp_rank,
            warn=warn,
        )

    def load_checkpoint(self) -> int:
        """Load the checkpoint that the configuration and the disk give; returns its step, 0 for none.

        Raises:
            UserError: the checkpoint does not fit this run.
        """
        self.owes_validation = False
        self.data_digest = on_rank_zero(lambda: training_data_digest(self.config.data))
        path = checkpoint_to_resume(self.config)
        if path is None:
            return 0
        self.resume_global_step = step_of(path) or 0
        self.checkpoint_manager.checkpoint_load_contents = contents_to_resume(path, self.config)
        self.checkpoint_manager.load_checkpoint(str(path))
        state = on_every_rank(lambda: self.saved_data_state(path))
        self.load_data_state(state)
        former = state.get("data_digest", "")  # older checkpoints have none
        if self.device_mesh.get_rank() == 0 and former and self.data_digest and former != self.data_digest:
            warn(
                f"the training data are not those of {path.name}, although the number of samples is the same; the run "
                "continues at the same position in the new data. Restore the previous data to resume exactly"
            )
        return self.resume_global_step

    def saved_data_state(self, checkpoint: Path) -> dict[str, Any]:
        """What `data_state` gave when a checkpoint was saved, also of one that verl wrote."""
        state = self.checkpoint_manager.load_data_state(str(checkpoint))
        if is_stock(checkpoint):
            return data_state_after_verl(checkpoint, state, len(self.train_dataset), self.config)
        return state

    def save_checkpoint(self, step: int) -> None:
        """Commit a checkpoint of this step, or begin to; collective."""
        self.checkpoint_manager.data_state = self.data_state()
        self.checkpoint_manager.save_checkpoint(
            str(Path(self.config.trainer.default_local_dir) / f"global_step_{step}"), global_step=step
        )

    def load_data_state(self, state: dict[str, Any]) -> None:
        """Go on from what `data_state` gave."""
        self.guard.num_skipped = state.get("skipped_steps", 0)
        self.owes_validation = state.get("owes_validation", False)
        self.train_sampler.load_state_dict(state)

    def data_state(self) -> dict[str, Any]:
        """What the next start needs to know besides model, optimizer, schedule and random numbers."""
        return {
            **self.train_sampler.state_dict(),
            "skipped_steps": self.guard.num_skipped,
            "owes_validation": self.owes_validation,
            "data_digest": self.data_digest,
        }
