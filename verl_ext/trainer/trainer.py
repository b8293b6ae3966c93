"""The trainer of all stages: builds, resumes, then steps, logs, validates and saves until done or stopped."""

from __future__ import annotations

import math
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from verl_ext.checkpoint.load import read_data_state
from verl_ext.checkpoint.manager import CheckpointManager
from verl_ext.checkpoint.manifest import EXPORT, Manifest, is_verl_checkpoint, step_of
from verl_ext.checkpoint.rebuild import write_deferred_export
from verl_ext.checkpoint.resume import CONTENTS, agree_on_checkpoint, agree_on_contents, is_of_run
from verl_ext.checkpoint.save import add_metrics
from verl_ext.config.run_config import config_digest
from verl_ext.config.schema import as_dict
from verl_ext.console import print_line, warn
from verl_ext.data.batching import MicroBatchPlan, Prefetcher
from verl_ext.data.chats import unpadded
from verl_ext.data.dataset import SampleDataset, training_data_digest
from verl_ext.data.sampler import GlobalBatchSampler
from verl_ext.distributed import gather_results, on_every_rank, on_rank_zero, to_local
from verl_ext.errors import Stop, UserError
from verl_ext.files import GIB, free_bytes
from verl_ext.metrics.run_record import RunRecord
from verl_ext.metrics.timing import StepTimer, TraceFile, startup
from verl_ext.processes import StopSignals
from verl_ext.trainer.device import resolve_device, resolve_precision
from verl_ext.trainer.fsdp import FSDPReshardPolicy
from verl_ext.trainer.model import build_model, forward_settings, recorded_check
from verl_ext.trainer.optimizer import build_optimizer, build_scheduler
from verl_ext.trainer.preemption import StopVote, ignore_stop_signals, known_deadline
from verl_ext.trainer.run_logger import RunLogger
from verl_ext.trainer.stages import RunConfig, config_of
from verl_ext.trainer.tokenizer import require_embeddings, tokenizer_of_exports
from verl_ext.verl_api import FSDPSFTTrainer, PrecisionType, fsdp2_clip_grad_norm_

Metrics = dict[str, float]
VALIDATION_METRICS = ("val/", "eval/")
KEPT_METRICS = ("train/", *VALIDATION_METRICS)
"""Prefixes of the metrics that a checkpoint's manifest keeps, for `best_metric`."""


class PipelineTrainer(FSDPSFTTrainer, ABC):
    """verl's SFT trainer as the base of all stages: exact resume, committed checkpoints, and a loop that can stop.

    A stage defines `build_collator`, `build_model`, `training_step` and `validate`, and overrides other methods as
    needed.

    verl's constructor does not run, because it refuses `data.chat_template` and changes the batch size in the
    configuration, which is recorded here. This constructor has the same arguments. Of verl's methods, only
    `_compute_loss_and_backward` is used, by `SFTTrainer` under Ulysses.

    Args:
        config: the configuration; a `DictConfig` with verl's keys is converted.
        device_mesh: one-dimensional mesh over all ranks, for FSDP2.
        ulysses_device_mesh: mesh with dimensions dp and sp.
        tokenizer: tokenizer with a chat template.
        train_dataset: samples, each with its number as `row`; padding of verl's datasets is removed.
        val_dataset: validation samples; None for a run without validation.
        signals: stop signals of this rank; None if the process handles its signals itself.

    Attributes:
        precision: dtype of the forward pass.
        checkpoint: checkpoint to resume from; None starts at step 0.
        load_contents: what to load from it, names of `resume.CONTENTS`.
        forward_check: what the stage found about its model by forward passes with the initial weights.
        global_step: number of training steps so far.
        saved_step: step of the last checkpoint.
        total_training_steps: step at which the run is finished.
        owes_validation: whether the run stopped before the validation of its current step.
        data_digest: identifies the training data; empty if it cannot be computed.
        reshard_policy: decides whether weights stay gathered between micro-batches.
    """

    config: RunConfig
    checkpoint_manager: CheckpointManager
    owes_validation: bool
    reshard_policy: FSDPReshardPolicy
    train_sampler: GlobalBatchSampler  # type: ignore[assignment]  # verl builds a DistributedSampler

    def __init__(
        self,
        config: RunConfig | DictConfig,
        device_mesh: DeviceMesh,
        ulysses_device_mesh: DeviceMesh,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: Any,
        val_dataset: Any,
        signals: StopSignals | None = None,
    ) -> None:
        self.config = config_of(config) if isinstance(config, DictConfig) else config
        self.device_name = resolve_device(self.config)
        self.precision = resolve_precision(self.config, self.device_name)
        self.device_mesh, self.ulysses_device_mesh = device_mesh, ulysses_device_mesh
        self.dp_size, self.dp_rank = ulysses_device_mesh.size(0), ulysses_device_mesh.get_local_rank("dp")
        self.is_main = device_mesh.get_rank() == 0
        self.run_dir = self.config.trainer.run_dir
        self.tokenizer, self.train_dataset = tokenizer, unpadded(train_dataset)
        self.val_dataset = None if val_dataset is None else unpadded(val_dataset)

        trace = self.trace = self.open_trace() if self.config.trainer.trace else None
        self.timer = StepTimer(on_gpu=self.device_name == "cuda", on_part=None if trace is None else trace.span)
        self.guard = NonFiniteGuard(self.config.trainer.max_nonfinite_steps, self.train_dataset.describe)
        deadline = known_deadline(self.config.trainer.preemption, self.is_main)
        grace_s = self.config.trainer.preemption.grace_s
        self.stop_vote = StopVote(signals, deadline, list(self.config.health.stop_on), grace_s)

        self.forward_check: dict[str, Any] = {}
        self.checkpoint, self.load_contents = self.choose_checkpoint()
        startup.mark("checkpoint")
        self.build_batches()
        self.global_step = self.saved_step = self.load_position()
        self.total_training_steps = self.config.trainer.total_training_steps or self.steps_of_epochs
        self.require_steps_after_start()
        self.model = self.fsdp_model = self.build_model()
        self.model_config = self.model.config
        self.optimizer = build_optimizer(self.model, self.config.optim)
        self.lr_scheduler: Any = self.build_scheduler()
        startup.mark("model")
        self.checkpoint_manager = self.build_checkpoint_manager()
        self.stop_vote.expected_save_s = self.checkpoint_manager.expected_save_s()
        self.grace_warnings: set[str] = set()
        self.step_metrics: Metrics = {}
        self.load_checkpoint()

    # What a stage defines

    @abstractmethod
    def build_collator(self) -> Callable[[list[Any]], Any]:
        """Return a function that builds a rank's batch from its samples, or from groups of `training_plan`."""

    @abstractmethod
    def build_model(self) -> PreTrainedModel:
        """Build the sharded model to train; collective."""

    @abstractmethod
    def training_step(self, batch: Any) -> Metrics:
        """Update the model once and return metrics that are reduced over all ranks.

        Args:
            batch: batch from the collator, with the `rows` of its samples.
        """

    @abstractmethod
    def validate(self) -> Metrics:
        """Return metrics of the model on the validation set; empty without one.

        Calls `stop_vote.raise_if_stopping` regularly, so that a long validation does not delay a stop.
        """

    def training_plan(self, dataset: SampleDataset) -> MicroBatchPlan | None:
        """Return which samples share a micro-batch and on which rank; None leaves this to the collator."""
        return None

    def build_model_to_check(
        self, before_sharding: Callable[[PreTrainedModel], None] = lambda model: None
    ) -> tuple[PreTrainedModel, dict[str, Any] | None]:
        """Build a language model without reading weights that `own_checkpoint` replaces.

        Returns:
            The sharded model, and the `forward_check` of an earlier start; None requires a new check.
        """
        settings = forward_settings(self.config, self.device_name, self.precision)
        self.forward_check = {"settings": settings}
        recorded = recorded_check(self.own_checkpoint, settings)
        checkpoint = None if recorded is None else self.own_checkpoint  # without weights, nothing can be checked
        model = build_model(self.config, self.device_mesh, self.precision, before_sharding, checkpoint)
        num_embeddings = model.get_input_embeddings().weight.shape[0]
        if len(self.tokenizer) > num_embeddings:
            for dataset in filter(None, (self.train_dataset, self.val_dataset)):
                require_embeddings(dataset, self.tokenizer, num_embeddings)
        return model, recorded

    # Building

    def open_trace(self) -> TraceFile:
        """Open this rank's trace of the attempt that begins with this start; collective."""
        attempt = on_rank_zero(RunRecord(self.run_dir).next_attempt)
        return TraceFile(self.run_dir, attempt, self.device_mesh.get_rank())

    def build_batches(self) -> None:
        """Build the sampler and the loader."""
        data = self.config.data
        self.collator = self.build_collator()
        plan = self.training_plan(self.train_dataset)
        self.train_sampler = GlobalBatchSampler(
            len(self.train_dataset),
            data.train_batch_size,
            self.dp_rank,
            self.dp_size,
            self.config.trainer.seed,
            plan,
            self.config.num_mini_batches,
        )
        loader = DataLoader(
            self.train_dataset,
            batch_sampler=self.train_sampler,
            num_workers=data.num_workers,
            collate_fn=self.collator,
            worker_init_fn=ignore_stop_signals,
            # Each iterator draws a seed; a resumed run would draw one more from the global generator.
            generator=torch.Generator(),
        )
        self.train_dataloader = loader if data.num_workers else Prefetcher(loader)

    @property
    def steps_of_epochs(self) -> int:
        """Step at the end of the last epoch; epochs before a change of `data.train_batch_size` had other lengths."""
        sampler = self.train_sampler
        batches_left = (self.config.trainer.total_epochs - sampler.epoch) * len(sampler) - sampler.batches_done
        return self.global_step + max(batches_left, 0)

    @property
    def epoch_of_step(self) -> float:
        """Number of epochs after the step that is running."""
        sampler = self.train_sampler
        return (sampler.epoch * len(sampler) + sampler.batches_done + 1) / len(sampler)

    def build_scheduler(self) -> LRScheduler:
        """Build the learning-rate schedule.

        As in verl, it spans the epochs, so that a run that `total_training_steps` ends early can be extended.
        """
        steps, per_step = self.config.optim.total_training_steps, self.config.updates_per_step
        if steps <= 0:
            steps = max(self.steps_of_epochs, self.total_training_steps)
        return build_scheduler(self.optimizer, self.config.optim, steps * per_step, per_step)

    def build_checkpoint_manager(self) -> CheckpointManager:
        """Build verl's checkpoint manager with this run's model, optimizer and schedule."""
        trainer = self.config.trainer
        return CheckpointManager(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            processing_class=self.processing_class,
            config=trainer.checkpoint,
            compute_dtype=self.precision,
            last_step=self.total_training_steps,
            seed=trainer.seed,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            updates_per_step=self.config.updates_per_step,
            config_digest=config_digest(as_dict(self.config)),
            optimizer_name=self.config.optim.class_name,
            hyperparameters=[*(self.config.optim.override_optimizer_config or {})],
        )

    @cached_property
    def processing_class(self) -> ProcessorMixin | PreTrainedTokenizerBase:
        """The tokenizer or processor for exports."""
        return on_every_rank(lambda: tokenizer_of_exports(self.config, self.tokenizer, self.is_main))

    # The loop

    def fit(self) -> None:
        """Train from the resumed step to the last one and record every step.

        Raises:
            Stop: a stop was requested; everything is saved.
        """
        self.stop_vote.arm()
        self.logger = RunLogger(
            self.config,
            self.global_step,
            self.total_training_steps,
            len(self.train_sampler),
            dist.get_world_size(),
            self.is_main,
            PrecisionType.to_str(self.precision),
            (len(self.train_dataset), 0 if self.val_dataset is None else len(self.val_dataset)),
        )
        self.warn_if_grace_is_short()
        with self.logger:
            try:
                self.train()
            except Stop as stop:
                if self.global_step > self.saved_step:
                    self.save(defers_export=stop.is_urgent)
                self.wait_for_save()
                raise
            except BaseException:
                self.wait_for_save_after_failure()
                raise
            self.wait_for_save()

    def train(self) -> None:
        """Run the remaining steps, each followed by validation and saving if due."""
        trainer = self.config.trainer
        self.stop_vote.raise_if_stopping()
        if self.owes_validation and on_rank_zero(self.is_validated):  # by an earlier start from the same checkpoint
            self.owes_validation = False
        if self.owes_validation or (self.global_step == 0 and trainer.val_before_train):
            self.run_validation()
            self.add_metrics_to_checkpoint()
        for batch in self.batches():
            rng_state = self.checkpoint_manager.get_rng_state()
            try:
                metrics = self.training_step(batch)
            except Stop:
                self.abandon_step(rng_state)
                raise
            self.step_metrics = {}
            self.log(metrics)
            self.end_step_timing()
            self.guard.check(self.global_step, batch.rows, self.saved_step)
            self.train_sampler.advance()
            if self.due(trainer.test_freq):
                self.run_validation()
            if self.due(trainer.save_freq) and (self.guard.streak == 0 or self.steps_left == 0):
                self.stop_if_asked()  # a requested stop saves without an export
                self.save()
            self.stop_if_asked()
        if self.guard.streak:
            raise UserError(
                f"the loss or its gradient was not finite at the last step, {self.global_step}, so its checkpoint has "
                "no export; continue from an earlier checkpoint, or export it with python -m verl_ext.checkpoint "
                f"export {self.run_dir}"
            )

    def batches(self) -> Iterator[Any]:
        """Yield batches from the current position to the last step, epoch after epoch; increments `global_step`."""
        while self.global_step < self.total_training_steps:
            batches = iter(self.train_dataloader)
            for _ in range(min(len(self.train_sampler) - self.train_sampler.batches_done, self.steps_left)):
                self.step_start = time.perf_counter()
                with self.timer.measure("data"):
                    batch = next(batches)
                self.global_step += 1
                yield batch

    def before_micro_batch(self, is_last: bool) -> None:
        """Prepare the next forward and backward pass; collective.

        Args:
            is_last: whether it is the last one before an update.

        Raises:
            Stop: on every rank, if a signal leaves no time to complete the step.
        """
        self.stop_vote.raise_if_interrupted()
        self.reshard_policy.before_micro_batch(is_last)

    def abandon_step(self, rng_state: dict[str, Any]) -> None:
        """Restore the state after the previous step; the next start repeats this one.

        Args:
            rng_state: random number generators at the start of the step.
        """
        if self.is_main:
            print_line(
                f"Step {self.global_step} is abandoned: trainer.preemption.grace_s is too short for it and a save"
            )
        self.reshard_policy.reshard()
        self.optimizer.zero_grad()
        self.checkpoint_manager.load_rng_state(rng_state)
        self.global_step -= 1

    @property
    def steps_left(self) -> int:
        """Number of steps until the run is finished."""
        return self.total_training_steps - self.global_step

    def due(self, frequency: int) -> bool:
        """Whether an action every `frequency` steps and at the last step is due; -1 means only at the last step."""
        return self.steps_left == 0 or (frequency > 0 and self.global_step % frequency == 0)

    def stop_if_asked(self) -> None:
        """Stop if any rank must, except after the last step; record a completed background save; collective.

        Raises:
            Stop: on every rank.
        """
        self.stop_vote.failed_rule = self.logger.stop_rule
        if self.steps_left:
            any_rank_writes = self.stop_vote.raise_if_stopping(self.checkpoint_manager.is_writing)
            if not any_rank_writes:
                self.wait_for_save()

    def run_validation(self) -> None:
        """Validate; if a stop interrupts the validation, the next start runs it."""
        self.owes_validation = True
        with self.stop_vote.validation():
            metrics = self.validate()
        self.owes_validation = False
        self.log(metrics)

    def log(self, metrics: Metrics) -> None:
        """Record metrics of the current step, and keep them for its checkpoint."""
        self.step_metrics.update(metrics)
        self.logger.log(self.global_step, metrics)

    def step_seconds(self) -> Metrics:
        """Return this rank's seconds in the step so far and in its parts; restarts the timer."""
        seconds = {"time/train/step_s": time.perf_counter() - self.step_start}
        return seconds | {f"time/train/{part}_s": value for part, value in self.timer.pop().items()}

    def end_step_timing(self) -> None:
        """Record the step in the trace, and its duration for the deadline."""
        end = time.perf_counter()
        if self.trace is not None:
            self.trace.span("step", self.step_start, end, step=self.global_step)
        self.stop_vote.note(step_s=end - self.step_start)
        self.warn_if_grace_is_short()

    def warn_if_grace_is_short(self) -> None:
        """Warn once if a save, and once if a step and a save take longer than a stop may take."""
        vote, num_saves = self.stop_vote, 2 if self.config.trainer.checkpoint.async_save else 1
        what, seconds, effect = "a step and a save", vote.needed_s(num_saves), "a stop abandons the step in progress"
        if vote.save_s > vote.grace_s:
            what, seconds, effect = "a save", vote.save_s, "a stop loses the steps after the last save"
        if self.is_main and seconds > vote.grace_s and what not in self.grace_warnings:
            self.grace_warnings.add(what)
            warn(
                f"{what} may take {seconds:.0f} s, but trainer.preemption.grace_s={vote.grace_s:g}, so {effect}; raise "
                "grace_s if the machine allows"
            )

    def optimizer_step(self, loss: float | torch.Tensor) -> tuple[float, float]:
        """Clip the gradient and update; skip the update and the schedule if loss or gradient is not finite.

        Loss and gradient norm are read together: in SFT, this is the only point of a step that waits for the GPU.

        Args:
            loss: loss of this step, the same on every rank.

        Returns:
            The loss, and the gradient norm before clipping.
        """
        foreach = True if self.device_name == "cuda" else None  # torch's default for DTensors is a loop
        norm = fsdp2_clip_grad_norm_(self.model.parameters(), max_norm=self.config.optim.clip_grad, foreach=foreach)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        both = torch.stack([torch.as_tensor(loss, device=norm.device).double(), norm.double()]).tolist()
        finite = all(map(math.isfinite, both))
        self.stop_vote.can_abandon_step = False  # from here, the step cannot be undone
        if finite:
            self.optimizer.step()
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        self.guard.count(finite)
        return both[0], both[1]

    def skip_update(self) -> None:
        """Only advance the schedule: without any loss, momentum and weight decay would still move the weights."""
        self.optimizer.zero_grad()
        with warnings.catch_warnings():  # torch warns if the schedule advances before the first update
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.lr_scheduler.step()

    # Saving

    def save(self, defers_export: bool = False) -> None:
        """Save the current step and record how long training waited for the save.

        Args:
            defers_export: whether the next start writes the export, because the time to save is limited.

        Raises:
            UserError: the weights are not finite; nothing is saved or removed.
        """
        start = time.perf_counter()
        self.wait_for_save()
        self.require_finite_weights()
        self.checkpoint_manager.step_metrics = self.kept_metrics()
        self.checkpoint_manager.defers_export = defers_export or self.guard.streak > 0
        self.save_checkpoint(self.global_step)
        self.saved_step = self.global_step
        self.log({"time/train/save_s": time.perf_counter() - start})

    def require_finite_weights(self) -> None:
        """Refuse to save weights that an update has damaged, before rotation removes earlier checkpoints; collective.

        Raises:
            UserError: a trained weight is NaN or infinite.
        """
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        sums = [to_local(parameter).sum().float() for parameter in trained]  # NaN and infinity persist in sums
        is_finite = bool(torch.stack(sums).isfinite().all())
        if not all(gather_results(lambda: is_finite)):
            raise UserError(
                f"the weights are not finite after step {self.global_step}, so no checkpoint was saved; lower optim.lr "
                f"({last_checkpoint(self.saved_step)})"
            )

    def kept_metrics(self) -> Metrics:
        """The metrics of the current step that its checkpoint's manifest keeps."""
        return {
            name: value
            for name, value in self.step_metrics.items()
            if name.startswith(KEPT_METRICS) and math.isfinite(value)
        }

    def is_validated(self) -> bool:
        """Whether the checkpoint that this run resumed from has everything that its validation yields."""
        return self.checkpoint is not None and any(
            name.startswith(VALIDATION_METRICS) for name in Manifest.read(self.checkpoint).metrics
        )

    def add_metrics_to_checkpoint(self) -> None:
        """Record a validation that a stop had interrupted in the checkpoint of that stop, for `best_metric`."""
        path = self.checkpoint
        if path is not None and is_of_run(path, self.run_dir) and step_of(path) == self.global_step:
            on_rank_zero(lambda: add_metrics(path, self.kept_metrics()))

    def save_checkpoint(self, step: int) -> None:
        """Commit a checkpoint of this step, or start to write it in the background; collective."""
        self.checkpoint_manager.data_state = self.data_state()
        self.checkpoint_manager.save_checkpoint(
            str(self.run_dir / f"global_step_{step}"),
            global_step=step,
            # finite weights may still be the reason for losses that are not; then earlier checkpoints are needed
            max_ckpt_to_keep=None if self.guard.streak else self.config.trainer.max_ckpt_to_keep,
        )

    def wait_for_save(self) -> None:
        """Wait for the checkpoint that is being written, if any, and record its duration."""
        seconds = self.checkpoint_manager.wait()
        if seconds is not None:
            self.stop_vote.note(save_s=seconds)
            free = free_bytes(self.run_dir) / GIB
            self.logger.log(self.saved_step, {"time/checkpoint/write_s": seconds, "system/disk_free_gib": free})

    def wait_for_save_after_failure(self) -> None:
        """`wait_for_save` after training has failed: a failed save is only a warning."""
        try:
            self.wait_for_save()
        except UserError as error:
            warn(str(error))

    # Resuming

    def choose_checkpoint(self) -> tuple[Path | None, list[str]]:
        """Choose the checkpoint to resume from, if any, and what to load from it; collective.

        Raises:
            UserError: see `agree_on_checkpoint`.
        """
        trainer, optimizer = self.config.trainer, self.config.optim.class_name
        path = agree_on_checkpoint(trainer, optimizer)
        return path, [] if path is None else agree_on_contents(path, trainer, optimizer)

    @property
    def own_checkpoint(self) -> Path | None:
        """`checkpoint` if this run saved it and loads its weights and RNG states, otherwise None.

        Without pretrained weights, building a model may consume other random numbers. Code that is not part of
        transformers may change, and set more than weights when it loads a model.
        """
        model, path = self.config.model, self.checkpoint
        is_own = path is not None and is_of_run(path, self.run_dir)
        has_own_code = model.trust_remote_code or model.external_lib is not None
        loads_all = {"model", "extra"} <= {*self.load_contents}
        return path if is_own and loads_all and not has_own_code else None

    def load_position(self) -> int:
        """Restore the `data_state` of the checkpoint to resume from, and return its step; 0 if there is none.

        Raises:
            UserError: the checkpoint does not match this run.
        """
        self.owes_validation = False
        self.data_digest = on_rank_zero(lambda: training_data_digest(self.config.data))
        path = self.checkpoint
        if path is None:
            return 0
        state = on_every_rank(lambda: self.saved_data_state(path))
        self.load_data_state(state)
        saved = state.get("data_digest", "")  # verl's checkpoints do not have it
        if self.is_main and saved and self.data_digest and saved != self.data_digest:
            warn(
                f"the training data has changed since {path.name}, although the number of samples is the same; the run "
                "continues at the same position in the new data. Restore the previous data to resume exactly"
            )
        return step_of(path) or 0

    def require_steps_after_start(self) -> None:
        """Refuse a last step that the checkpoint in `resume_from_path` has reached: no step would be trained or saved.

        A finished run that names its own checkpoint, with all of its contents, is resumed like any finished run.

        Raises:
            UserError: no step is left.
        """
        trainer, path = self.config.trainer, self.checkpoint
        if path is None or self.steps_left > 0 or trainer.resume_from_path is None:
            return
        is_own = is_of_run(path, self.run_dir)
        if path != Path(trainer.resume_from_path) or (is_own and {*CONTENTS} <= {*self.load_contents}):
            return
        length = "total_epochs" if trainer.total_training_steps is None else "total_training_steps"
        raise UserError(
            f"trainer.resume_from_path {path} continues after step {self.global_step}, but this run ends at step "
            f"{self.total_training_steps}; raise trainer.{length}, or start a new run {self.weights_of(path)}"
        )

    def weights_of(self, checkpoint: Path) -> str:
        """Name the settings that start a run at step 0 from the weights of a checkpoint."""
        key = "controller.init_from" if self.config.stage == "budget" else "model.partial_pretrain"
        return f"from its weights with {key}={checkpoint / EXPORT} trainer.resume_from_path=null"

    def load_checkpoint(self) -> int:
        """Load the checkpoint to resume from, except its `data_state`, and return its step; 0 if there is none.

        Raises:
            UserError: the checkpoint does not match this run.
        """
        path = self.checkpoint
        if path is None:
            return 0
        self.checkpoint_manager.checkpoint_load_contents = self.load_contents
        self.checkpoint_manager.load_checkpoint(str(path))
        if is_of_run(path, self.run_dir) and self.guard.streak == 0:
            export, small_files = self.config.trainer.checkpoint.export, self.checkpoint_manager.export_files
            on_rank_zero(lambda: write_deferred_export(path, export, small_files))
        return self.global_step

    def saved_data_state(self, checkpoint: Path) -> dict[str, Any]:
        """Return the `data_state` of a checkpoint, including checkpoints that verl wrote."""
        state = read_data_state(checkpoint)
        if not is_verl_checkpoint(checkpoint):
            return state
        if "samples_seen" in state:  # this pipeline wrote it, but its manifest and export plan are lost
            raise UserError(
                f"{checkpoint} lost its manifest.json; restore it, or specify another checkpoint to resume from"
            )
        manifest = Manifest.read(checkpoint)
        num_ranks = max(manifest.world_size // self.config.sequence_parallel_size, 1)
        state, doubt = self.train_sampler.state_after_verl(state, manifest.step, num_ranks)
        if self.is_main:
            print_line(
                f"{checkpoint.name} was written by verl; continuing in verl's data order at sample "
                f"{state['samples_seen']} of {state['num_samples']} in epoch {state['epoch']}. verl's checkpoints are "
                "never removed.",
                sys.__stdout__,
            )
        if self.is_main and doubt is not None:
            warn(f"{checkpoint.name}: {doubt}")
        return state

    def data_state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs besides model, optimizer, schedule and RNG states."""
        return {
            **self.train_sampler.state_dict(),
            "skipped_steps": self.guard.num_skipped,
            "steps_without_update": self.guard.streak,
            "owes_validation": self.owes_validation,
            "data_digest": self.data_digest,
            "forward_check": self.forward_check,
        }

    def load_data_state(self, state: dict[str, Any]) -> None:
        """Restore what `data_state` returned."""
        self.guard.num_skipped = state.get("skipped_steps", 0)
        self.guard.streak = state.get("steps_without_update", 0)
        self.owes_validation = state.get("owes_validation", False)
        path = self.checkpoint
        if path is None or is_of_run(path, self.run_dir):
            self.train_sampler.load_state_dict(state)
        else:  # this run is already a new one
            self.train_sampler.load_state_dict(state, f"start {self.weights_of(path)}")


class NonFiniteGuard:
    """Counts skipped updates, whose loss or gradient is not finite, and consecutive steps without any other update.

    Args:
        limit: number of such steps in a row after which the run stops.
        describe: names samples by their numbers in the training set.

    Attributes:
        streak: number of the latest steps in a row without an update.
        num_skipped: number of skipped updates of the run; a step may have several.
    """

    def __init__(self, limit: int, describe: Callable[[Sequence[int]], str]) -> None:
        self.limit, self.describe = limit, describe
        self.streak = 0
        self.num_skipped = 0
        self._has_update: bool | None = None

    def count(self, finite: bool) -> None:
        """Count an update; `finite` says whether its loss and gradient norm are, and is the same on every rank."""
        self._has_update = bool(self._has_update) or finite
        self.num_skipped += not finite

    def check(self, step: int, rows: Sequence[int], saved_step: int) -> None:
        """End a step, and stop the run if the limit is reached; collective in that case.

        A step that attempted no update, for lack of loss tokens, does not change the streak.

        Args:
            rows: this rank's samples of the step.
            saved_step: step of the last checkpoint.

        Raises:
            UserError: with the step, the rows of all ranks, and the last checkpoint.
        """
        if self._has_update is None:
            return
        self.streak, self._has_update = 0 if self._has_update else self.streak + 1, None
        if self.streak < self.limit:
            return
        all_rows = sorted({row for rows_of_rank in gather_results(lambda: list(rows)) for row in rows_of_rank})
        raise UserError(
            f"the loss or its gradient was not finite for {self.streak} steps in a row, the last at step {step}; lower "
            f"optim.lr, check the model's weights, or look at the batch: {self.describe(all_rows)} "
            f"(no update was made on those steps; {last_checkpoint(saved_step)})"
        )


def last_checkpoint(step: int) -> str:
    """Name the last checkpoint, saved at `step`, and say what to do if it has the same problem."""
    if step == 0:
        return "there is no checkpoint"
    return f"the last checkpoint is global_step_{step}; if its weights are the cause, remove it and use an earlier one"
