"""How long a step takes: what the machines can do, operations, bytes over links and from memory, and what overlaps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl_ext.plan.memory import KV_CACHE, engine_parts, kv_token_bytes
from verl_ext.plan.model_shape import ModelShape
from verl_ext.plan.workload import DeviceSpec, PlannedConfig, RankWorkload, longest_sample
from verl_ext.trainer.stages import GRPOConfig

ADAMW_PASSES = 25
"""Reads and writes of a shard in an update: 1 for the norm, 2 for clipping, and in AdamW over lists of tensors (torch
2.9, `_multi_tensor_adam`) 2 for the weight decay, 3 for the first moment, 5 for the second, 8 for its roots, 4 for the
weights."""
DECODE_SHARE = 0.8
"""Share of a GPU's memory bandwidth that decoding reaches; an assumption."""

DISK_GBPS = 1.0
"""Default of `disk_gbps`, in 10^9 bytes per second: what protocols leave of a 10 Gbit/s link (1.25) to shared storage,
where the checkpoints of several nodes have to be. A local NVMe disk writes several times as much."""


# Machines


@dataclass(frozen=True, kw_only=True)
class Hardware(DeviceSpec):
    """One kind of GPU or processor core, with its links, from data sheets.

    `memory_bytes` counts 80 GB as 80e9, as data sheets do. A GPU shows some 6 % more, which is left for what has no
    formula here: the CUDA context, NCCL's own buffers, workspaces and the allocator's fragments.

    Attributes:
        name: as in `hardware=`.
        flops: dense matrix products per second, in the type of the forward pass.
        memory_bandwidth: bytes per second from and to its memory.
        link: bytes per second that it sends to others of its node, while it receives as many.
        network: the same to other nodes, its share of the node's adapters.
        compute_share: share of `flops` that a training step reaches, everything between matrix products included.
        link_share: share of `link` and `network` that a large collective reaches.
        latency: seconds that a collective takes per rank that its ring passes.
    """

    name: str
    flops: float
    memory_bandwidth: float
    link: float
    network: float
    compute_share: float
    link_share: float = 0.78  # 350 of 450 GB/s in an all-gather on H100: github.com/NVIDIA/nccl/issues/1281
    latency: float = 3e-6


_H100 = Hardware(  # NVIDIA H100 SXM data sheet; network: DGX H100, one 400 Gb/s adapter per GPU
    name="h100",
    memory_bytes=80e9,
    is_gpu=True,
    flops=989e12,
    memory_bandwidth=3.35e12,
    link=450e9,
    network=50e9,
    compute_share=0.40,
)
_H200 = replace(_H100, name="h200", memory_bytes=141e9, memory_bandwidth=4.8e12)  # NVIDIA H200 SXM data sheet
# NVIDIA A100 SXM 80GB data sheet; network: DGX A100, one 200 Gb/s adapter per GPU
_A100 = replace(
    _H100, name="a100", flops=312e12, memory_bandwidth=2.039e12, link=300e9, network=25e9, compute_share=0.50
)
_CPU = Hardware(  # a core of an Intel Xeon with AVX-512 at 2.3 GHz: 64 fp32 operations a cycle; bandwidths are assumed
    name="cpu",
    memory_bytes=12 * 2**30,
    is_gpu=False,
    flops=147e9,
    memory_bandwidth=10e9,
    link=1.5e9,
    network=1e9,
    compute_share=0.60,
    link_share=1.0,
    latency=1e-4,
)
HARDWARE = {each.name: each for each in (_H100, _H200, _A100, _CPU)}
"""By name. The compute shares are estimates from what torchtitan reports: 33 to 39 % on H100, without recomputed
operations, which count here (docs/design/memory_model.md has the link), and 57 % on A100 with torch.compile
(torchtitan's docs/performance.md)."""


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes, each with one GPU or core, which together write `disk_gbps` 10^9 bytes per second to the disk."""

    hardware: Hardware
    gpus: int
    gpus_per_node: int
    disk_gbps: float = DISK_GBPS

    @property
    def num_nodes(self) -> int:
        """Nodes, of which the last may not be full."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def slowest_link(self) -> str:
        """What a large collective waits for."""
        slow_network = self.hardware.network * self.gpus_per_node < self.hardware.link
        return "the network" if self.num_nodes > 1 and slow_network else "the links of a node"

    @property
    def flops_per_s(self) -> float:
        """Operations per second that a rank reaches."""
        return self.hardware.flops * self.hardware.compute_share

    def collective_s(self, whole_bytes: float) -> float:
        """Seconds of an all-gather or a reduce-scatter of a tensor of `whole_bytes` in total.

        A ring moves (n - 1) / n of it through each rank (NCCL's doc/PERFORMANCE.md, "bus bandwidth"). Between nodes the
        same holds for whole nodes, each of which sends through the adapters of all its GPUs. The slower of the two
        counts, and every hop of the ring adds a latency.
        """
        if self.gpus == 1 or not whole_bytes:
            return 0.0
        hardware, nodes = self.hardware, self.num_nodes
        inside = whole_bytes * (self.gpus - 1) / self.gpus / hardware.link
        between = whole_bytes * (nodes - 1) / nodes / (hardware.network * min(self.gpus, self.gpus_per_node))
        return max(inside, between) / hardware.link_share + (self.gpus - 1) * hardware.latency


# A step


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        parts: in sequence; GRPO adds generation and weight sync to compute, exposed communication and optimizer.
        hidden_s: communication that overlaps with compute.
        model_flops: operations of the model itself, without recomputed ones, over all ranks.
        tokens: trained tokens, over all ranks.
    """

    parts: dict[str, float]
    hidden_s: float
    model_flops: float
    tokens: float

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Over all ranks."""
        return self.tokens / self.total_s

    @property
    def bound_by(self) -> str:
        """The longest part."""
        return max(self.parts, key=lambda name: self.parts[name])


def step_time(config: PlannedConfig, shape: ModelShape, work: RankWorkload, cluster: Cluster) -> StepTime:
    """The time of a step, with all its updates."""
    forward, layers = forward_flops(shape, work, cluster.gpus)
    num_micro_batches = work.num_micro_batches * work.num_updates
    forward_s = forward / cluster.flops_per_s / num_micro_batches
    recomputed_s = layers / cluster.flops_per_s / num_micro_batches if work.checkpointing else 0
    backward_s = 2 * forward_s + recomputed_s
    exposed = hidden = 0.0
    for number in range(work.num_micro_batches):
        is_first, is_last = number == 0, number == work.num_micro_batches - 1
        of_forward, of_backward = collectives_s(shape, work, cluster, is_first, is_last)
        for compute_s, (overlapping, alone) in ((forward_s, of_forward), (backward_s, of_backward)):
            exposed += alone + max(overlapping - compute_s, 0)
            hidden += min(overlapping, compute_s)
    extra_passes = work.forward_passes * num_micro_batches
    overlapping, alone = collectives_s(shape, work, cluster, is_first=True, is_last=False)[0]
    parts = {}
    if isinstance(config, GRPOConfig):
        sent_bytes = shape.numel * work.engine_bytes if config.rollout.engine == "vllm" else 0
        parts["generation"] = generation_s(config, shape, work, cluster)
        parts["weights to the engine"] = cluster.collective_s(sent_bytes)
    parts["compute"] = num_micro_batches * (forward_s + backward_s) + extra_passes * forward_s
    parts["communication"] = exposed * work.num_updates + extra_passes * (alone + max(overlapping - forward_s, 0))
    passed_bytes = ADAMW_PASSES * work.master_bytes * shape.shard_numel(cluster.gpus)
    parts["optimizer"] = work.num_updates * passed_bytes / cluster.hardware.memory_bandwidth
    tokens = work.samples * work.tokens_per_sample
    return StepTime(parts, hidden * work.num_updates, 3 * forward * cluster.gpus, tokens)


def forward_flops(shape: ModelShape, work: RankWorkload, num_ranks: int) -> tuple[float, float]:
    """Operations of one forward pass over all of a rank's tokens, and those of its layers, which checkpointing repeats.

    Two for each parameter and token, and 4 x width of the heads for each pair of tokens in attention (Kaplan et al.
    2020, arXiv 2001.08361, table 1). GRPO needs only the logits of completions. Half of the pairs count with kernels
    that skip what comes later; sdpa skips nothing once it has a mask.
    """
    tokens = work.samples / num_ranks * work.tokens_per_sample
    seen_tokens = work.tokens_per_sample if work.attention == "masked" else work.tokens_per_sample / 2
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * tokens * seen_tokens
    layers = 2 * shape.num_layers * shape.layer.numel * tokens + attention
    logit_share = (work.loss_tokens if work.fused_loss else work.logit_tokens) / work.tokens
    return layers + 2 * shape.vocab * shape.hidden * tokens * logit_share, layers


def collectives_s(
    shape: ModelShape, work: RankWorkload, cluster: Cluster, is_first: bool, is_last: bool
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of collectives that layers can hide, and of those that nothing can: forward, then backward.

    FSDP2 gathers a layer while the one before computes, and reduces its gradient while the next one computes. Gathering
    the root and the embedding at the start has nothing before it, and reducing them at the end has nothing after it.
    Weights that stay gathered are gathered for the first micro-batch, and reduced in the last.
    """
    layer, ends = shape.layer.numel, [shape.root.numel, shape.embedding.numel]

    def seconds(numels: list[int], size: int) -> float:
        return sum(cluster.collective_s(numel * size) for numel in numels)

    layers = [layer] * shape.num_layers
    gather, gather_ends = seconds(layers, work.compute_bytes), seconds(ends, work.compute_bytes)
    reduce, reduce_ends = seconds(layers, work.reduce_bytes), seconds(ends, work.reduce_bytes)
    if work.keeps_gathered:
        return (gather * is_first, gather_ends * is_first), (reduce * is_last, reduce_ends * is_last)
    return (gather, gather_ends), (gather + reduce, seconds(ends[:1], work.compute_bytes) + reduce_ends)


def generation_s(config: GRPOConfig, shape: ModelShape, work: RankWorkload, cluster: Cluster) -> float:
    """Prompts take one forward pass; then every token reads all weights, and the keys and values before it.

    Pope et al. 2022 (arXiv 2211.05102), section 2. All completions have the mean length, and as many are concurrent as
    the engine takes and its cache holds.
    """
    rollout, hardware = config.rollout, cluster.hardware
    tensor_parallel, length = rollout.tensor_model_parallel_size, work.tokens_per_sample
    prompt = length * config.data.max_prompt_length / longest_sample(config)
    in_engine = work.samples / cluster.gpus * tensor_parallel
    token_bytes = kv_token_bytes(config, shape, work)
    room = engine_parts(config, shape, work, cluster.gpus, hardware)[KV_CACHE] / token_bytes / length
    concurrent = max(min(in_engine, rollout.max_num_seqs * tensor_parallel, room), 1.0)
    flops_per_s = cluster.flops_per_s * tensor_parallel
    prefill_s = 2 * shape.matmul_numel * in_engine * prompt / flops_per_s
    read = work.engine_bytes * shape.matmul_numel / tensor_parallel
    read += concurrent * (prompt + length) / 2 * token_bytes
    token_s = max(read / (hardware.memory_bandwidth * DECODE_SHARE), 2 * shape.matmul_numel * concurrent / flops_per_s)
    return prefill_s + in_engine / concurrent * (length - prompt) * token_s
