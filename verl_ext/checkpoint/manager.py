"""verl's checkpoint manager with crash-safe saves, background saves, and loading on any number of ranks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.optim.lr_scheduler import LambdaLR
from transformers import set_seed

from verl_ext.checkpoint.config import CheckpointConfig
from verl_ext.checkpoint.hf_export import ExportedWeights, HuggingFaceExport, adapter_files
from verl_ext.checkpoint.load import derived_seed, load_model, load_optimizer
from verl_ext.checkpoint.manifest import DATA_STATE, EXPORT, EXTRA, FSDP_CONFIG, MODEL, OPTIMIZER, Manifest
from verl_ext.checkpoint.save import CheckpointWriter, bytes_of
from verl_ext.checkpoint.shards import ShardFiles
from verl_ext.checkpoint.staging import CpuStager
from verl_ext.distributed import COLLECTIVE_TIMEOUT, on_every_rank
from verl_ext.processes import quiet_stdout
from verl_ext.verl_api import FSDPCheckpointManager, PrecisionType, get_device_name

EXPECTED_BYTES_PER_S = 0.5e9
"""Assumed write speed of all ranks together until a save has been measured; a slow disk."""


class CheckpointManager(FSDPCheckpointManager):
    """Saves checkpoints with the protocol of `verl_ext.checkpoint.save`, and loads them on any number of ranks.

    Attributes:
        data_state: position in the data, saved with the next checkpoint.
        step_metrics: metrics of the step, saved with the next checkpoint.
        defers_export: whether the next checkpoint omits its export, which `write_deferred_export` then writes.
    """

    def __init__(
        self,
        *,
        config: CheckpointConfig,
        compute_dtype: torch.dtype,
        last_step: int,
        seed: int,
        dp_size: int,
        dp_rank: int,
        updates_per_step: int,
        config_digest: str,
        optimizer_name: str,
        hyperparameters: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        """Prepare exports and create a process group for saves; collective.

        Args:
            compute_dtype: dtype of the forward pass, for exports with `export.dtype=auto`.
            last_step: last step of the run, which is always exported.
            seed: the run's `trainer.seed`.
            dp_size: number of data-parallel ranks; several ranks may share a sequence.
            dp_rank: data-parallel rank, which seeds random numbers; ranks that share a sequence have the same.
            updates_per_step: optimizer updates per step, each of which advances the schedule.
            optimizer_name: qualified class name of the optimizer, for the manifest.
            hyperparameters: names that `optim.override_optimizer_config` sets; see `load_optimizer`.
            kwargs: `model`, `optimizer`, `lr_scheduler` and `processing_class`, as in verl's manager.

        Raises:
            UserError: see `HuggingFaceExport`.
        """
        contents = {"save_contents": list(config.save_contents), "load_contents": list(config.load_contents)}
        super().__init__(checkpoint_config=OmegaConf.create(contents), **kwargs)
        self.config, self.seed, self.dp_size, self.dp_rank = config, seed, dp_size, dp_rank
        self.updates_per_step = updates_per_step
        self.config_digest, self.optimizer_name = config_digest, optimizer_name
        self.hyperparameters = hyperparameters
        self.data_state: dict[str, Any] = {}
        self.step_metrics: dict[str, float] = {}
        self.defers_export = False
        is_auto = config.export.dtype == "auto"
        self._export = HuggingFaceExport(
            self.model,
            self.processing_class,
            config.export,
            dtype=compute_dtype if is_auto else PrecisionType.to_dtype(config.export.dtype),
            last_step=last_step,
            with_weights=self.should_save_hf_model,
            is_main=self.rank == 0,
        )
        self._stager = CpuStager()
        # a separate group, so that background saves and training never wait for each other's collectives
        with quiet_stdout():
            self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._background: Future[float] | None = None

    # Saving

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Save a checkpoint, or start a background save, and then rotate old checkpoints; collective.

        Args:
            local_path: the final directory, `.../global_step_N`.
            hdfs_path: unused, as in verl.
            global_step: N.
            max_ckpt_to_keep: number of newest checkpoints to keep; None keeps all.

        Raises:
            UserError: this save failed, or the previous background save failed.
        """
        self.wait()
        state = self._state()
        is_deferred = self.defers_export and self._export.is_due(global_step)
        weights = None if is_deferred else self._export.at(global_step, state[MODEL])
        adapters = adapter_files(self.model, state[MODEL], self.rank == 0)
        writer = CheckpointWriter(
            final=Path(local_path),
            rank=self.rank,
            manifest=Manifest(
                step=global_step,
                world_size=self.world_size,
                config_digest=self.config_digest,
                files={},
                metrics=dict(self.step_metrics),
                time=time.time(),
                optimizer=self.optimizer_name if self.should_save_optimizer else "",
                export_dtype=PrecisionType.to_str(self._export.dtype),
                deferred=(EXPORT,) if is_deferred else (),
            ),
            weights=weights,
            shared_files={**self._shared_files(weights), **adapters} if self.rank == 0 else {},
            max_to_keep=max_ckpt_to_keep,
            config=self.config,
            group=self._group,
        )
        writer.prepare(state)
        if self.config.async_save:
            staged = self._stager.stage(state)
            self._background = _start(lambda: _finish(writer, writer.write(staged)))
        else:
            seconds = writer.write(state)
            # rotation can take nearly as long as writing, and nothing has to wait for it
            self._background = _start(lambda: _finish(writer, seconds))

    @property
    def is_writing(self) -> bool:
        """Whether a save, or the rotation after it, is in progress on this rank."""
        return self._background is not None and not self._background.done()

    def wait(self) -> float | None:
        """Wait for the last save and the rotation after it.

        Returns:
            Write time in seconds; None if nothing was saved since the last call.

        Raises:
            UserError: the save failed; raised on every rank.
        """
        background, self._background = self._background, None
        return None if background is None else background.result()

    def expected_save_s(self) -> float:
        """Estimated duration of the first save, in seconds: model, AdamW's two moments, and a half-size export."""
        own_bytes = bytes_of(self.model.state_dict())
        return 3.5 * own_bytes * self.world_size / EXPECTED_BYTES_PER_S

    @property
    def export_files(self) -> dict[str, bytes]:
        """Configuration, tokenizer and similar files of an export, by path relative to it; empty except on rank 0."""
        files = self._export.small_files(None)
        return {name.removeprefix(f"{EXPORT}/"): files[name] for name in files if name.startswith(f"{EXPORT}/")}

    def _state(self) -> dict[str, Any]:
        """The state that this rank saves, by kind of shard; the tensors are not copied."""
        state: dict[str, Any] = {}
        if self.should_save_model:
            state[MODEL] = self.model.state_dict()
        if self.should_save_optimizer:
            state[OPTIMIZER] = self.optimizer.state_dict()
        if self.should_save_extra:
            state[EXTRA] = {
                "lr_scheduler": self.lr_scheduler.state_dict(),
                "updates_per_step": self.updates_per_step,
                "dp_size": self.dp_size,
                "rng": self.get_rng_state(),
            }
        return state

    def _shared_files(self, weights: ExportedWeights | None) -> dict[str, Any]:
        """Content of the files that rank 0 writes for all ranks, by relative path."""
        return {
            **self._export.small_files(weights),
            FSDP_CONFIG: json.dumps({"FSDP_version": 2, "world_size": self.world_size}).encode(),
            DATA_STATE: dict(self.data_state),
        }

    # Loading

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load a checkpoint of any number of ranks; collective.

        Args:
            local_path: a complete `global_step_N`.
            hdfs_path: unused, as in verl.
            del_local_after_load: unused, because loading makes no local copy.

        Raises:
            UserError: the checkpoint does not fit this run.
        """
        on_every_rank(lambda: self._load(Path(local_path)))

    def _load(self, checkpoint: Path) -> None:
        """Load this rank's part, independently of the other ranks."""
        if self.should_load_model:
            load_model(self.model, checkpoint)
        if self.should_load_optimizer:
            load_optimizer(self.model, self.optimizer, checkpoint, self.hyperparameters)
        if self.should_load_extra:
            self._load_extra(checkpoint)

    def _load_extra(self, checkpoint: Path) -> None:
        """Load the schedule, and the RNG states if ranks and device type are the same; otherwise `derived_seed`."""
        files = ShardFiles(checkpoint, EXTRA)
        same_number = files.world_size == self.world_size
        extra = files.content(self.rank if same_number else 0)
        self._load_schedule(extra["lr_scheduler"], extra.get("updates_per_step", self.updates_per_step))
        same_sequences = extra.get("dp_size", self.dp_size) == self.dp_size
        # States of a GPU include that of the CPU.
        if same_number and same_sequences and get_device_name() in extra["rng"]:
            self.load_rng_state(extra["rng"])
        else:
            set_seed(derived_seed(self.seed, Manifest.read(checkpoint).step, self.dp_rank))

    def _load_schedule(self, state: dict[str, Any], updates_per_step: int) -> None:
        """Load the position in the schedule, and set the learning rate of the next step.

        The peak and the length may differ from the saved ones, so this run's schedule determines the learning rate.

        Args:
            state: the saved state of the schedule.
            updates_per_step: updates per step of the run that saved the state; the saved position counts updates and
                is converted.
        """
        scheduler = self.lr_scheduler
        if isinstance(scheduler, LambdaLR):
            own_peaks = scheduler.base_lrs
            position = state["last_epoch"] * self.updates_per_step // updates_per_step
            scheduler.load_state_dict({**state, "last_epoch": position})
            scheduler.base_lrs = own_peaks
            factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
            scheduler._last_lr = [peak * factor for peak, factor in zip(own_peaks, factors)]
        else:
            scheduler.load_state_dict(state)
        for group, rate in zip(self.optimizer.param_groups, scheduler.get_last_lr()):
            group["lr"] = rate


def _finish(writer: CheckpointWriter, seconds: float) -> float:
    writer.rotate()
    return seconds


def _start(work: Callable[[], float]) -> Future[float]:
    """Run `work` in a daemon thread, so that a crashed rank does not stay alive waiting for other ranks.

    Executor threads are not daemon threads.
    """
    future: Future[float] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future
