"""Predicts step time from hardware speed, FLOPs, bytes over links and from memory, and overlap."""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl_ext.plan.activations import QUADRATIC
from verl_ext.plan.memory import FP32, KV_CACHE, engine_parts, engine_ranks, kv_token_bytes
from verl_ext.plan.model_shape import ModelShape
from verl_ext.plan.workload import DeviceSpec, PlannedConfig, RankWorkload, longest_sample
from verl_ext.trainer.stages import GRPOConfig

ADAMW_PASSES = {"foreach": 25, "for-loop": 25, "fused": 10}
"""Reads and writes of a shard in an update, by implementation of AdamW: 1 for the norm, 2 for clipping, and in AdamW
over tensors or lists of them (torch 2.9, `_multi_tensor_adam`) 2 for the weight decay, 3 for the first moment, 5 for
the second, 8 for its roots, 4 for the weights. One kernel reads weights, gradients and moments, 4, and writes 3."""
AMSGRAD_PASSES = {"foreach": 3, "for-loop": 3, "fused": 2}
"""Additional reads and writes for each moment beyond the second: the maximum of the second moments."""
DECODE_SHARE = 0.8
"""Fraction of a GPU's memory bandwidth that decoding reaches; an assumption."""

DISK_GBPS = 1.0
"""Default of `disk_gbps`, in 10^9 bytes per second: a 10 Gbit/s link (1.25) to shared storage, which several nodes
need, minus protocol overhead. A local NVMe disk is several times as fast."""


# Machines


@dataclass(frozen=True, kw_only=True)
class Hardware(DeviceSpec):
    """A type of GPU or processor core with its links, from data sheets.

    `memory_bytes` counts 80 GB as 80e9, as data sheets do. GPUs report about 6% more, which is reserved for memory
    without a formula here: the CUDA context, NCCL's own buffers, workspaces and allocator fragmentation.

    Attributes:
        name: name in `hardware=`.
        flops: FLOPs per second of dense matrix products in bf16; on CPUs, in any dtype.
        fp32_flops: the same in fp32, without TF32, which training does not use.
        memory_bandwidth: bytes per second from and to its memory.
        link: bytes per second in each direction, within a node.
        network: bytes per second in each direction to other nodes, its share of the node's adapters.
        compute_share: fraction of `flops` or `fp32_flops` that a training step reaches, including all other operations.
        link_share: fraction of `link` and `network` that a large collective reaches.
        latency: seconds per hop of a collective's ring.
    """

    name: str
    flops: float
    fp32_flops: float
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
    fp32_flops=67e12,
    memory_bandwidth=3.35e12,
    link=450e9,
    network=50e9,
    compute_share=0.40,
)
_H200 = replace(_H100, name="h200", memory_bytes=141e9, memory_bandwidth=4.8e12)  # NVIDIA H200 SXM data sheet
# NVIDIA A100 SXM 80GB data sheet; network: DGX A100, one 200 Gb/s adapter per GPU
_A100 = replace(
    _H100,
    name="a100",
    flops=312e12,
    fp32_flops=19.5e12,
    memory_bandwidth=2.039e12,
    link=300e9,
    network=25e9,
    compute_share=0.50,
)
_CPU = Hardware(  # a core of an Intel Xeon with AVX-512 at 2.3 GHz: 64 fp32 operations a cycle; bandwidths are assumed
    name="cpu",
    memory_bytes=12 * 2**30,
    is_gpu=False,
    flops=147e9,
    fp32_flops=147e9,
    memory_bandwidth=10e9,
    link=1.5e9,
    network=1e9,
    compute_share=0.60,
    link_share=1.0,
    latency=1e-4,
)
HARDWARE = {each.name: each for each in (_H100, _H200, _A100, _CPU)}
"""Hardware by name. The compute shares are estimated from torchtitan's reports: 33 to 39% on H100, excluding
recomputation, which counts here, and 57% on A100 with torch.compile (torchtitan's docs/performance.md)."""


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes, each with one GPU or core; together they write `disk_gbps` 10^9 bytes per second to disk."""

    hardware: Hardware
    gpus: int
    gpus_per_node: int
    disk_gbps: float = DISK_GBPS

    @property
    def num_nodes(self) -> int:
        """Number of nodes; the last may be partly used."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def slowest_link(self) -> str:
        """The link that limits a large collective."""
        slow_network = self.hardware.network * self.gpus_per_node < self.hardware.link
        return "the network" if self.num_nodes > 1 and slow_network else "the links of a node"

    def flops_per_s(self, number_bytes: int) -> float:
        """Return the FLOPs per second that a rank reaches with numbers of that size."""
        peak = self.hardware.fp32_flops if number_bytes == FP32 else self.hardware.flops
        return peak * self.hardware.compute_share

    def collective_s(self, whole_bytes: float) -> float:
        """Seconds of an all-gather or reduce-scatter of a tensor of `whole_bytes` in total.

        A ring moves (n - 1) / n of the tensor through each rank (NCCL's doc/PERFORMANCE.md, "bus bandwidth"). Between
        nodes, the same holds for whole nodes, which send through the adapters of all their GPUs. The slower of the two
        counts, and every hop of the ring adds latency.
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
        parts: seconds of sequential parts: compute, exposed communication and optimizer; generation and weight sync in
            GRPO.
        hidden_s: communication that overlaps with compute.
        model_flops: FLOPs of the model itself in all epochs, without recomputation, over all ranks.
        tokens: trained tokens, over all ranks; several epochs count each once.
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
        """Trained tokens per second over all ranks."""
        return self.tokens / self.total_s

    @property
    def bound_by(self) -> str:
        """The longest part."""
        return max(self.parts, key=lambda name: self.parts[name])


def step_time(config: PlannedConfig, shape: ModelShape, work: RankWorkload, cluster: Cluster) -> StepTime:
    """Predict the time of a step with all its updates."""
    forward, layers, unneeded = pass_flops(shape, work, cluster.gpus)
    num_micro_batches = work.num_micro_batches * work.num_updates // work.num_epochs  # of a pass over the samples
    flops_per_s = cluster.flops_per_s(work.compute_bytes)
    forward_s = forward / flops_per_s / num_micro_batches
    recomputed_s = layers / flops_per_s / num_micro_batches if work.checkpointing else 0
    backward_s = 2 * forward_s + recomputed_s - unneeded / flops_per_s / num_micro_batches
    exposed = hidden = 0.0
    for number in range(work.num_micro_batches):
        is_first, is_last = number == 0, number == work.num_micro_batches - 1
        of_forward, of_backward = collectives_s(shape, work, cluster, is_first, is_last)
        for compute_s, (overlapping, alone) in ((forward_s, of_forward), (backward_s, of_backward)):
            exposed += alone + max(overlapping - compute_s, 0)
            hidden += min(overlapping, compute_s)
    extra_passes = work.forward_passes * num_micro_batches  # once, before all epochs
    overlapping, alone = collectives_s(shape, work, cluster, is_first=True, is_last=False)[0]
    parts = {}
    if isinstance(config, GRPOConfig):
        sent_bytes = shape.numel * work.engine_bytes if config.rollout.engine == "vllm" else 0
        parts["generation"] = generation_s(config, shape, work, cluster)
        parts["weights to the engine"] = cluster.collective_s(sent_bytes)
    trained_passes = work.num_epochs * num_micro_batches
    parts["compute"] = trained_passes * (forward_s + backward_s) + extra_passes * forward_s
    parts["communication"] = exposed * work.num_updates + extra_passes * (alone + max(overlapping - forward_s, 0))
    state_bytes = work.master_bytes * shape.trained.shard_numel(cluster.gpus)
    implementation = work.optimizer_implementation
    passes = ADAMW_PASSES[implementation] + (work.num_moments - 2) * AMSGRAD_PASSES[implementation]
    parts["optimizer"] = work.num_updates * passes * state_bytes / cluster.hardware.memory_bandwidth
    tokens = work.samples * work.tokens_per_sample
    model_flops = work.num_epochs * (3 * forward - unneeded) * cluster.gpus
    return StepTime(parts, hidden * work.num_updates, model_flops, tokens)


def pass_flops(shape: ModelShape, work: RankWorkload, num_ranks: int) -> tuple[float, float, float]:
    """Operations over all of a rank's tokens.

    Returns:
        Those of a forward pass; those of its layers, which checkpointing repeats; and those of the gradients of frozen
        weights, which the backward pass does not compute.

    Counts 2 per parameter and token, and 4 x total head width per pair of tokens in attention (Kaplan et al. 2020,
    arXiv 2001.08361, table 1). GRPO needs only the logits of completions. Causal kernels compute half of the pairs;
    eager attention and sdpa with a mask compute all.
    """
    tokens = work.samples / num_ranks * work.tokens_per_sample
    seen_tokens = work.tokens_per_sample if work.attention in QUADRATIC else work.tokens_per_sample / 2
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * tokens * seen_tokens
    layers = 2 * shape.num_layers * shape.layer.numel * tokens + attention
    logit_share = (work.loss_tokens if work.fused_loss else work.logit_tokens) / work.tokens
    logits = 2 * shape.vocab * shape.hidden * tokens * logit_share
    frozen = 2 * shape.num_layers * (shape.layer.numel - shape.trained.layer.numel) * tokens
    return layers + logits, layers, frozen + logits if shape.uses_lora else 0.0


def collectives_s(
    shape: ModelShape, work: RankWorkload, cluster: Cluster, is_first: bool, is_last: bool
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of collectives that can overlap with layers, and of those that cannot: forward, then backward.

    FSDP2 gathers a layer while the previous one computes, and reduces its gradient while the next one computes. The
    root and the embedding are gathered at the start and reduced at the end, without overlap. Weights that stay gathered
    are gathered in the first micro-batch and reduced in the last.
    """

    def seconds(groups: ModelShape, size: int) -> tuple[float, float]:
        of_layer, root, embedding = (
            cluster.collective_s(group.numel * size) for group in (groups.layer, groups.root, groups.embedding)
        )
        return groups.num_layers * of_layer, root + embedding

    gather, gather_ends = seconds(shape, work.compute_bytes)
    reduce, reduce_ends = seconds(shape.trained, work.reduce_bytes)
    if work.keeps_gathered:
        return (gather * is_first, gather_ends * is_first), (reduce * is_last, reduce_ends * is_last)
    gather_root = cluster.collective_s(shape.root.numel * work.compute_bytes)
    return (gather, gather_ends), (gather + reduce, gather_root + reduce_ends)


def generation_s(config: GRPOConfig, shape: ModelShape, work: RankWorkload, cluster: Cluster) -> float:
    """Seconds of generation: one forward pass for prompts; then each token reads all weights, keys and values.

    See Pope et al. 2022 (arXiv 2211.05102), section 2. Both engines compute the prompt of a group once. All completions
    have the mean length; their concurrency is limited by the engine and its cache.
    """
    rollout, hardware = config.rollout, cluster.hardware
    tensor_parallel, length = engine_ranks(config), work.tokens_per_sample
    prompt = length * config.data.max_prompt_length / longest_sample(config)
    in_engine = work.samples / cluster.gpus * tensor_parallel
    token_bytes = kv_token_bytes(config, shape, work)
    room = engine_parts(config, shape, work, cluster.gpus, hardware)[KV_CACHE] / token_bytes / length
    concurrent = max(min(in_engine, rollout.max_num_seqs * tensor_parallel, room), 1.0)
    flops_per_s = cluster.flops_per_s(work.engine_bytes) * tensor_parallel
    prefill_s = 2 * shape.matmul_numel * in_engine / rollout.n * prompt / flops_per_s
    read = work.engine_bytes * shape.matmul_numel / tensor_parallel
    read += concurrent * (prompt + length) / 2 * token_bytes
    token_s = max(read / (hardware.memory_bandwidth * DECODE_SHARE), 2 * shape.matmul_numel * concurrent / flops_per_s)
    return prefill_s + in_engine / concurrent * (length - prompt) * token_s
