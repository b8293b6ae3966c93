"""The plan of a configuration on a number of GPUs: memory, time, disk, whether it fits, and how to make it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from verl_ext.config.schema import set_at
from verl_ext.errors import UserError
from verl_ext.files import GIB
from verl_ext.plan.memory import StepMemory, check_engine_ranks, engine_shortage, step_memory
from verl_ext.plan.model_shape import ModelShape
from verl_ext.plan.step_time import Cluster, StepTime, step_time
from verl_ext.plan.workload import (
    DTYPE_BYTES,
    DataLengths,
    PlannedConfig,
    RankWorkload,
    samples_per_update,
    token_budget,
    workload_of,
)
from verl_ext.trainer.stages import GRPOConfig

Overrides = dict[str, Any]
UTILIZATION, TENSOR_PARALLEL = "rollout.gpu_memory_utilization", "rollout.tensor_model_parallel_size"
MAX_UTILIZATION = 90
"""Maximum percentage of a GPU's memory that a suggestion gives to an engine."""
WORKING_SHARE = 0.05
"""Fraction of a GPU's memory that a suggestion leaves for vLLM's activations, for which the plan has no formula."""


@dataclass(frozen=True)
class DiskUse:
    """Disk use of checkpoints.

    Attributes:
        parts: bytes of one checkpoint: weights, optimizer, export.
        max_checkpoints: maximum number that exist at a time, including the one being written; None if all are kept and
            their number depends on the data.
        num_without_optimizer: number of them whose optimizer state is deleted.
        num_without_export: number of them that have no export.
        save_s: seconds to write one checkpoint.
    """

    parts: dict[str, float]
    max_checkpoints: int | None
    num_without_optimizer: int
    num_without_export: int
    save_s: float

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of one checkpoint with its export."""
        return sum(self.parts.values())

    @property
    def total_bytes(self) -> float | None:
        """Bytes of all checkpoints that exist at a time; None if their number is unknown."""
        if self.max_checkpoints is None:
            return None
        without = self.num_without_optimizer * self.parts["optimizer"] + self.num_without_export * self.parts["export"]
        return self.max_checkpoints * self.checkpoint_bytes - without


@dataclass(frozen=True)
class RunPlan:
    """The memory of a rank, the time of a step, and the disk use of a run.

    Attributes:
        lengths: lengths of the data.
        work: workload of a rank in a step.
        shortage: why the rollout engine cannot start; empty if it can, or if there is none.
    """

    config: PlannedConfig
    shape: ModelShape
    cluster: Cluster
    lengths: DataLengths
    work: RankWorkload
    memory: StepMemory
    time: StepTime
    disk: DiskUse
    shortage: str

    @property
    def fits(self) -> bool:
        """Whether the peak is within the data sheet's memory (`Hardware`), and the engine can start."""
        return not self.shortage and self.memory.peak_bytes <= self.cluster.hardware.memory_bytes

    @property
    def fix(self) -> str:
        """How to make the plan fit, in one sentence; empty if it fits."""
        return "" if self.fits else suggest_fix(self)

    @property
    def bound_by(self) -> str:
        """The longest part of a step."""
        bound = self.time.bound_by
        return f"{bound} ({self.cluster.slowest_link})" if bound == "communication" else bound

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model's FLOPs relative to the bf16 peak of all GPUs, as verl counts."""
        return self.time.model_flops / self.time.total_s / self.cluster.gpus / self.cluster.hardware.flops

    @property
    def micro_batch(self) -> str:
        """The configured size of a micro-batch, in tokens or samples."""
        budget = token_budget(self.config)
        if budget is not None:
            return f"{budget} tokens"
        return str(min(self.config.data.micro_batch_size_per_gpu, samples_per_update(self.config, self.cluster.gpus)))


def make_plan(config: PlannedConfig, shape: ModelShape, cluster: Cluster, lengths: DataLengths) -> RunPlan:
    """Predict memory, time and disk of a resolved configuration.

    Raises:
        UserError: the configuration cannot run on the cluster, or the plan has no formulas for it.
    """
    hardware = cluster.hardware
    work = workload_of(config, shape.numel, shape.trained.numel, cluster.gpus, hardware, lengths)
    if isinstance(config, GRPOConfig):
        check_engine_ranks(config, shape)
    memory = step_memory(config, shape, work, cluster.gpus, hardware)
    time = step_time(config, shape, work, cluster)
    disk = disk_use(config, shape, work, cluster.disk_gbps)
    shortage = engine_shortage(config, shape, work, hardware) if isinstance(config, GRPOConfig) else ""
    return RunPlan(config, shape, cluster, lengths, work, memory, time, disk, shortage)


# Disk


def disk_use(config: PlannedConfig, shape: ModelShape, work: RankWorkload, gbps: float) -> DiskUse:
    """Predict disk use: weights and AdamW's moments in the stored dtype, and the export in its dtype.

    With LoRA, a checkpoint has the frozen weights, too, and an export has merged ones.

    Schedule, RNG states and tokenizer are ignored; they take a few MB. All ranks together write `gbps` 10^9 bytes
    per second.
    """
    checkpoint = config.trainer.checkpoint
    export = work.compute_bytes if checkpoint.export.dtype == "auto" else DTYPE_BYTES[checkpoint.export.dtype]
    moments = work.num_moments if "optimizer" in checkpoint.save_contents else 0
    merged_numel = shape.numel - shape.trained.numel if shape.uses_lora else shape.numel
    parts = {
        "weights": float(work.master_bytes * shape.numel),
        "optimizer": float(moments * work.master_bytes * shape.trained.numel),
        "export": float(export * merged_numel * ("hf_model" in checkpoint.save_contents)),
    }
    max_kept = max_checkpoints(config)
    stripped = checkpoint.keep_best if checkpoint.drop_optimizer_of_best else 0
    plain = (max_kept or 1) - int(min(max_kept or 1, max_exports(config)))
    return DiskUse(parts, max_kept, min(stripped, (max_kept or 1) - 1), plain, sum(parts.values()) / (gbps * 1e9))


def max_checkpoints(config: PlannedConfig) -> int | None:
    """Maximum number of checkpoints at a time; None if all are kept and the number of steps depends on the data.

    Rotation keeps the newest, the best and the evaluated best ones, and removes others after the commit of the next.
    """
    trainer = config.trainer
    if trainer.save_freq < 1:  # the last step only
        return 1
    counts = []
    if trainer.max_ckpt_to_keep is not None:
        counts.append(trainer.max_ckpt_to_keep + trainer.checkpoint.keep_best + config.eval.watch + 1)
    if trainer.total_training_steps is not None:
        counts.append(math.ceil(trainer.total_training_steps / trainer.save_freq))
    return min(counts, default=None)


def max_exports(config: PlannedConfig) -> float:
    """Maximum number of checkpoints with an export at a time; inf if nothing limits it.

    The last step and the best checkpoints may have one in any case.
    """
    trainer, every = config.trainer, config.trainer.checkpoint.export.every
    counts = [math.inf]
    if every is not None and trainer.max_ckpt_to_keep is not None:
        newest = 1 + math.ceil(trainer.max_ckpt_to_keep * trainer.save_freq / every)
        counts.append(newest + trainer.checkpoint.keep_best + config.eval.watch)
    if every is not None and trainer.total_training_steps is not None:
        counts.append(math.ceil(trainer.total_training_steps / every))
    return min(counts)


# Suggestions that make it fit


def with_overrides(plan: RunPlan, overrides: Overrides, gpus: int | None = None) -> RunPlan | None:
    """Return the plan with other settings or another number of GPUs; None if it cannot run."""
    config = deepcopy(plan.config)
    for key, value in overrides.items():
        set_at(config, key, value)
    cluster = replace(plan.cluster, gpus=gpus or plan.cluster.gpus)
    try:
        return make_plan(config, plan.shape, cluster, plan.lengths)
    except UserError:
        return None


def suggest_fix(plan: RunPlan) -> str:
    """Say in one sentence which change makes the plan fit; cheap changes are tried first."""
    cause = f"{plan.shortage}; " if plan.shortage else ""
    for overrides, gpus in candidate_fixes(plan):
        other = with_overrides(plan, overrides, gpus)
        if other is not None and other.fits:
            changes = [
                f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in overrides.items()
            ]
            text = " and ".join(changes + ([f"{gpus} GPUs"] if gpus else []))
            return f"{cause}with {text} it takes {other.memory.peak_bytes / GIB:.1f} GiB and fits."
    more = "GPUs with more memory" if plan.cluster.hardware.is_gpu else "fewer ranks, a machine with more memory"
    return f"{cause}no known setting makes it fit; use {more}, or a smaller model."


def candidate_fixes(plan: RunPlan) -> Iterator[tuple[Overrides, int | None]]:
    """Yield overrides and numbers of GPUs to try, in order; all give the rollout engine the memory that it needs."""
    room = room_for_engine(plan)
    if room:
        yield room, None
    yield from (({**room, **each}, None) for each in smaller_engines(plan))
    can_fuse_loss = plan.shape.has_fused_loss and not plan.work.fused_loss and not plan.work.is_grpo
    saving: Overrides = {"model.fused_loss": True} if can_fuse_loss else {}
    checkpointing: Overrides = {} if plan.work.checkpointing else {"model.enable_gradient_checkpointing": True}
    smaller = smaller_micro_batches(plan)
    least = {**room, **saving, **checkpointing, **(smaller[-1] if smaller else {})}
    # on CPUs, smaller micro-batches take no longer, and recomputed layers do
    cheap = (checkpointing, *smaller) if plan.cluster.hardware.is_gpu else (*smaller, checkpointing)
    for overrides in (saving, *cheap, {**saving, **checkpointing}, least):
        if overrides:
            yield {**room, **overrides}, None
    if isinstance(plan.config, GRPOConfig):
        length = plan.config.data.max_response_length
        yield from (({**least, "data.max_response_length": length // each}, None) for each in (2, 4) if length >= each)
    if plan.cluster.hardware.is_gpu:  # ranks on CPUs share the memory of their machine
        yield from ((least, plan.cluster.gpus * factor) for factor in (2, 4, 8, 16))


def smaller_micro_batches(plan: RunPlan) -> list[Overrides]:
    """Return overrides of the key that limits a micro-batch, largest first."""
    budget, size = token_budget(plan.config), plan.config.data.micro_batch_size_per_gpu
    if budget is None:
        return [{"data.micro_batch_size_per_gpu": each} for each in (32, 16, 8, 4, 2, 1) if each < size]
    budgets = [budget // factor for factor in (2, 4, 8, 16, 32, 64)]
    return [{"data.max_tokens_per_gpu": each} for each in budgets if each >= plan.config.data.max_length]


def room_for_engine(plan: RunPlan) -> Overrides:
    """Return the smallest change that lets an engine start: a larger share of the memory, or more GPUs per engine.

    Empty if the engine has enough memory, or if no change suffices.
    """
    if not plan.shortage:
        return {}
    config = deepcopy(plan.config)
    assert isinstance(config, GRPOConfig)
    rollout = config.rollout
    utilization, tensor_parallel = rollout.gpu_memory_utilization, rollout.tensor_model_parallel_size
    shares = [utilization, *(each / 100 for each in range(10, MAX_UTILIZATION + 1, 5) if each / 100 >= utilization)]
    for size in (tensor_parallel * factor for factor in (1, 2, 4, 8)):
        if plan.cluster.gpus % size or size > plan.cluster.gpus_per_node or not plan.shape.splits_heads(size):
            continue
        for share in shares:
            rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization = size, share - WORKING_SHARE
            if not engine_shortage(config, plan.shape, plan.work, plan.cluster.hardware):
                overrides: Overrides = {} if size == tensor_parallel else {TENSOR_PARALLEL: size}
                return overrides if share == utilization else {**overrides, UTILIZATION: share}
    return {}


def smaller_engines(plan: RunPlan) -> Iterator[Overrides]:
    """Yield overrides for the engine: let it sleep, give it less memory, or generate fewer completions at a time."""
    if isinstance(plan.config, GRPOConfig) and plan.config.rollout.engine == "hf":
        yield from ({"rollout.max_num_seqs": each} for each in (64, 16) if each < plan.config.rollout.max_num_seqs)
    if isinstance(plan.config, GRPOConfig) and plan.config.rollout.engine == "vllm":
        if not plan.config.rollout.free_cache_engine:
            yield {"rollout.free_cache_engine": True}
        for percent in (50, 40, 30, 20):
            if percent / 100 < plan.config.rollout.gpu_memory_utilization:
                yield {UTILIZATION: percent / 100}


def largest_that_fits(plan: RunPlan) -> RunPlan:
    """Return the plan with the largest micro-batch that fits, or the largest token budget if it has one.

    Doubles sizes from one sample, and budgets from the longest sample. If none fits, returns the smallest.
    """
    key, size = "data.micro_batch_size_per_gpu", 1
    if token_budget(plan.config) is not None:
        key, size = "data.max_tokens_per_gpu", plan.config.data.max_length
    limit = samples_per_update(plan.config, plan.cluster.gpus) * size
    best: RunPlan | None = None
    while size <= limit:
        other = with_overrides(plan, {key: size})
        if other is None or (best is not None and not other.fits):
            break
        best, size = other, size * 2
    return best or plan
