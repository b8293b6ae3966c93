"""What drawing completions takes on a rank: the engine's weights and cache, and the seconds of generation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from verl_ext.files import GIB
from verl_ext.plan.links import Cluster
from verl_ext.plan.memory import Memory, Parts
from verl_ext.plan.shape import ModelShape
from verl_ext.plan.speed import StepTime
from verl_ext.plan.workload import BYTES, Workload
from verl_ext.trainer.stages import GRPOConfig

MEMORY_SHARE = 0.8
"""Of a GPU's memory bandwidth that decoding reaches; an assumption."""


@dataclass(frozen=True)
class Rollout:
    """The section `rollout`.

    Attributes:
        is_vllm: else transformers draws with the trained weights.
        bytes: of a number in the engine.
        tensor_parallel: ranks that share an engine's weights.
        utilization: share of a GPU's memory that vLLM takes.
        sleeps: whether it gives that memory back while the model is updated.
        max_num_seqs: completions under way at a time on a rank.
        bucket: bytes of weights on their way to the engine at a time.
        prompt, response: tokens of a completion and what it answers; the longest there can be.
    """

    is_vllm: bool
    bytes: int
    tensor_parallel: int
    utilization: float
    sleeps: bool
    max_num_seqs: int
    bucket: float
    prompt: int
    response: int

    @classmethod
    def of(cls, config: GRPOConfig, is_gpu: bool) -> Rollout:
        """Read a configuration of the stage grpo."""
        rollout, data = config.rollout, config.data
        named = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
        size = BYTES["bf16" if is_gpu else "fp32"] if rollout.dtype == "auto" else BYTES[named[rollout.dtype]]
        return cls(
            rollout.engine == "vllm", size, rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization,
            rollout.free_cache_engine and is_gpu, rollout.max_num_seqs, rollout.update_weights_bucket_megabytes * 2**20,
            data.max_prompt_length, data.max_response_length,
        )  # fmt: skip

    def token_bytes(self, shape: ModelShape) -> float:
        """One token's keys and values on one rank."""
        return shape.kv_numel * self.bytes / self.tensor_parallel

    def parts(self, shape: ModelShape, work: Workload, cluster: Cluster) -> Parts:
        """Memory while completions are drawn.

        On a GPU vLLM takes what `gpu_memory_utilization` gives it, and what weights leave is its cache and working
        memory. Elsewhere the cache is what the completions under way need. transformers draws with gathered layers.
        """
        weights = self.bytes * shape.numel / self.tensor_parallel
        wanted = min(self.max_num_seqs, work.samples / cluster.gpus) * (self.prompt + self.response)
        if not self.is_vllm:
            weights, size = work.compute_bytes * shape.numel, shape.kv_numel * work.compute_bytes
            return {"engine weights": weights, "KV cache": wanted * size}
        if not cluster.hardware.is_gpu:
            return {"engine weights": weights, "KV cache": wanted * self.token_bytes(shape)}
        cache = self.utilization * cluster.hardware.memory_bytes - weights
        return {"engine weights": weights, "KV cache": max(cache, 0.0)}

    def shortage(self, shape: ModelShape, cluster: Cluster) -> str:
        """Why vLLM cannot start on these GPUs; empty if it can.

        vLLM refuses to start if its share of the GPU does not hold the weights and the cache of one sequence of the
        longest length (`check_enough_kv_cache_memory`).
        """
        if not self.is_vllm or not cluster.hardware.is_gpu:
            return ""
        share = self.utilization * cluster.hardware.memory_bytes
        weights = self.bytes * shape.numel / self.tensor_parallel
        sequence = (self.prompt + self.response) * self.token_bytes(shape)
        if weights + sequence <= share:
            return ""
        return (
            f"vLLM cannot start with rollout.gpu_memory_utilization={self.utilization:g}, which is {share / GIB:.1f} "
            f"GiB of a GPU: it needs {weights / GIB:.1f} GiB for its weights and {sequence / GIB:.1f} GiB for the "
            f"cache of one sequence of {self.prompt + self.response} tokens"
        )


def with_rollout(memory: Memory, rollout: Rollout, shape: ModelShape, work: Workload, cluster: Cluster) -> Memory:
    """The moments of the update, the engine asleep or not, and that of drawing."""
    engine = rollout.parts(shape, work, cluster)
    state = {part: memory.moments["optimizer"][part] for part in ("weights",)}
    state["optimizer"] = 2 * state["weights"]
    largest = max(math.prod(each) for group in shape.groups for each in group.shapes) * rollout.bytes
    on_its_way = max(rollout.bucket, largest) * (1 + 1 / cluster.gpus) if rollout.is_vllm else 0.0
    stays = {} if rollout.sleeps or not rollout.is_vllm else engine
    moments = {name: {**parts, **stays} for name, parts in memory.moments.items()}
    return Memory({**moments, "drawing": {**state, **engine, "communication": on_its_way}})


def with_generation(time: StepTime, rollout: Rollout, shape: ModelShape, work: Workload, cluster: Cluster) -> StepTime:
    """The step with its generation, and with the way of the weights to the engine."""
    sync = cluster.collective_s(shape.numel * rollout.bytes) if rollout.is_vllm else 0.0
    parts = {"generation": generation_s(rollout, shape, work, cluster), "weights to the engine": sync, **time.parts}
    return replace(time, parts=parts)


def generation_s(rollout: Rollout, shape: ModelShape, work: Workload, cluster: Cluster) -> float:
    """Prompts are computed at once; then every token reads all weights and the keys and values before it.

    Pope et al. 2022 (arXiv 2211.05102), section 2. All completions are as long as the mean says, and those that are
    under way at a time are as many as the engine takes and its cache holds.
    """
    hardware, length = cluster.hardware, work.tokens_per_sample
    prompt = length * rollout.prompt / (rollout.prompt + rollout.response)
    in_engine = work.samples / cluster.gpus * rollout.tensor_parallel
    parts = rollout.parts(shape, work, cluster)
    room = parts["KV cache"] / rollout.token_bytes(shape) / length
    at_once = max(min(in_engine, rollout.max_num_seqs * rollout.tensor_parallel, room), 1.0)
    per_second = hardware.flops * hardware.compute_share * rollout.tensor_parallel
    prefill = 2 * shape.matmul_numel * in_engine * prompt / per_second
    read = rollout.bytes * shape.matmul_numel / rollout.tensor_parallel
    read += at_once * (prompt + length) / 2 * rollout.token_bytes(shape)
    token_s = max(read / (hardware.memory_bandwidth * MEMORY_SHARE), 2 * shape.matmul_numel * at_once / per_second)
    return prefill + in_engine / at_once * (length - prompt) * token_s
