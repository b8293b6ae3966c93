"""The plan of one configuration on so many GPUs: memory, time, whether it fits, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from verl_ext.config.schema import set_at
from verl_ext.errors import UserError
from verl_ext.plan.links import Cluster
from verl_ext.plan.memory import Memory, StepMemory
from verl_ext.plan.rollout import GIB, Rollout, with_generation, with_rollout
from verl_ext.plan.shape import ModelShape
from verl_ext.plan.speed import StepTime, step_time
from verl_ext.plan.workload import Lengths, Workload, samples_between_updates, switch, workload_of
from verl_ext.trainer.stages import GRPOConfig, SFTConfig

Settings = dict[str, Any]
UTILIZATION, TENSOR_PARALLEL = "rollout.gpu_memory_utilization", "rollout.tensor_model_parallel_size"
MAX_UTILIZATION = 90
"""Percent of a GPU's memory that the advice gives to an engine at most."""
WORKING_SHARE = 0.05
"""Of a GPU's memory that the advice leaves for vLLM's activations, for which the plan has no formula."""


@dataclass(frozen=True)
class Plan:
    """What was predicted.

    Attributes:
        config: the configuration.
        cluster: the machines.
        shape: the model.
        work: a rank's step.
        memory: of a rank.
        time: of a step.
        shortage: why the rollout engine cannot start; empty if it can, or if there is none.
    """

    config: SFTConfig | GRPOConfig
    cluster: Cluster
    shape: ModelShape
    work: Workload
    memory: Memory
    time: StepTime
    shortage: str = ""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the data sheet's memory (`Hardware.memory_bytes`) and the engine can start."""
        return not self.shortage and self.memory.peak_bytes <= self.cluster.hardware.memory_bytes

    @property
    def bound_by(self) -> str:
        """What the step waits for most."""
        bound = self.time.bound_by
        return f"{bound} ({self.cluster.slowest_link})" if bound == "communication" else bound

    @property
    def mfu(self) -> float:
        """The model's operations, by the peak of all GPUs."""
        return self.time.model_flops / self.time.total_s / self.cluster.gpus / self.cluster.hardware.flops

    @property
    def micro_batch(self) -> str:
        """How samples share a forward pass, as the configuration sets it."""
        budget = switch(self.config, "data.max_tokens_per_gpu")
        if budget is not None:
            return f"{budget} tokens"
        return (
            f"{min(self.config.data.micro_batch_size_per_gpu, samples_between_updates(self.config, self.cluster.gpus))}"
        )


def make_plan(config: SFTConfig | GRPOConfig, shape: ModelShape, cluster: Cluster, lengths: Lengths) -> Plan:
    """Predict.

    Args:
        config: resolved, of the stage sft or grpo.
        shape: of its model.
        cluster: that it is to run on.
        lengths: of the data.

    Raises:
        UserError: the configuration cannot run there, or the plan has no formulas for it.
    """
    work = workload_of(config, shape.numel, cluster.gpus, cluster.hardware, lengths)
    memory = StepMemory(shape, work, cluster.gpus, cluster.hardware.is_gpu).memory()
    time = step_time(shape, work, cluster)
    shortage = ""
    if isinstance(config, GRPOConfig):
        rollout = Rollout.of(config, cluster.hardware.is_gpu)
        memory = with_rollout(memory, rollout, shape, work, cluster)
        time = with_generation(time, rollout, shape, work, cluster)
        shortage = rollout.shortage(shape, cluster)
    return Plan(config, cluster, shape, work, memory, time, shortage)


def changed(plan: Plan, lengths: Lengths, settings: dict[str, Any], gpus: int | None = None) -> Plan | None:
    """The plan with other settings; None where they cannot run."""
    config = deepcopy(plan.config)
    for key, value in settings.items():
        set_at(config, key, value)
    try:
        return make_plan(config, plan.shape, replace(plan.cluster, gpus=gpus or plan.cluster.gpus), lengths)
    except UserError:
        return None


def advice(plan: Plan, lengths: Lengths) -> str:
    """One sentence: what makes it fit, tried out by the same formulas, from what costs least to what costs most."""
    cause = f"{plan.shortage}; " if plan.shortage else ""
    for settings, gpus in remedies(plan):
        other = changed(plan, lengths, settings, gpus)
        if other is not None and other.fits:
            texts = [
                f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()
            ]
            what = " and ".join(texts + ([f"{gpus} GPUs"] if gpus else []))
            return f"{cause}with {what} it takes {other.memory.peak_bytes / GIB:.1f} GiB and fits."
    return f"{cause}no setting that the plan knows makes it fit; take GPUs with more memory, or a smaller model."


def remedies(plan: Plan) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Settings to try, in order, and numbers of GPUs; all of them give the rollout engine the room that it needs."""
    room = room_for_engine(plan)
    if room:
        yield room, None
    yield from (({**room, **each}, None) for each in remedies_of_engine(plan))
    saving: Settings = {} if plan.work.fused_loss or plan.work.is_grpo else {"model.fused_loss": True}
    checkpointing: Settings = {} if plan.work.checkpointing else {"model.enable_gradient_checkpointing": True}
    key, size = "data.micro_batch_size_per_gpu", plan.config.data.micro_batch_size_per_gpu
    smaller: list[Settings] = [{key: each} for each in (32, 16, 8, 4, 2, 1) if each < size]
    least = {**room, **saving, **checkpointing, **(smaller[-1] if smaller else {})}
    for settings in (saving, checkpointing, *smaller, {**saving, **checkpointing}, least):
        if settings:
            yield {**room, **settings}, None
    for factor in (2, 4, 8, 16):
        yield least, plan.cluster.gpus * factor


def room_for_engine(plan: Plan) -> Settings:
    """The smallest change with which an engine that lacks memory starts: a larger share, or more GPUs per engine.

    Empty if the engine has room, or if neither is enough.
    """
    if not plan.shortage:
        return {}
    assert isinstance(plan.config, GRPOConfig)
    engine = Rollout.of(plan.config, plan.cluster.hardware.is_gpu)
    shares = [engine.utilization, *(each / 100 for each in range(10, MAX_UTILIZATION + 1, 5))]
    for size in (engine.tensor_parallel * factor for factor in (1, 2, 4, 8)):
        if plan.cluster.gpus % size or size > plan.cluster.gpus_per_node:
            continue
        for share in (each for each in shares if each >= engine.utilization):
            other = replace(engine, utilization=share - WORKING_SHARE, tensor_parallel=size)
            if not other.shortage(plan.shape, plan.cluster):
                settings: Settings = {} if size == engine.tensor_parallel else {TENSOR_PARALLEL: size}
                return settings if share == engine.utilization else {**settings, UTILIZATION: share}
    return {}


def remedies_of_engine(plan: Plan) -> Iterator[Settings]:
    """Where an engine shares the GPUs: less of them for it, or that it sleeps."""
    if isinstance(plan.config, GRPOConfig) and plan.config.rollout.engine == "vllm":
        if not plan.config.rollout.free_cache_engine:
            yield {"rollout.free_cache_engine": True}
        for percent in (50, 40, 30, 20):
            if percent / 100 < plan.config.rollout.gpu_memory_utilization:
                yield {UTILIZATION: percent / 100}


def largest_that_fits(plan: Plan, lengths: Lengths) -> Plan:
    """The same with the largest micro-batch, or the largest token budget where there is one, that fits.

    Sizes are doubled from one sample, budgets from the longest sample. Where none fits, the smallest.
    """
    has_budget = switch(plan.config, "data.max_tokens_per_gpu") is not None
    key, size = ("data.micro_batch_size_per_gpu", 1)
    if has_budget:
        key, size = "data.max_tokens_per_gpu", plan.config.data.max_length
    most = samples_between_updates(plan.config, plan.cluster.gpus) * size
    best: Plan | None = None
    while size <= most:
        other = changed(plan, lengths, {key: size})
        if other is None or (best is not None and not other.fits):
            break
        best, size = other, size * 2
    return best or plan
