"""How long a step takes: operations, bytes over links, bytes from memory, and what of them hides behind what."""

from __future__ import annotations

from dataclasses import dataclass

from verl_ext.plan.activations import has_mask
from verl_ext.plan.links import Cluster
from verl_ext.plan.shape import ModelShape
from verl_ext.plan.workload import Workload

ADAMW_PASSES = 25
"""Reads and writes of a shard in an update: 1 for the norm, 2 for clipping, and in AdamW over lists of tensors (torch
2.9, `_multi_tensor_adam`) 2 for the weight decay, 3 for the first moment, 5 for the second, 8 for its roots, 4 for the
weights."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, which follow each other.

    Attributes:
        parts: compute, communication that nothing hides, optimizer, and in GRPO generation and weights.
        hidden_s: of communication behind compute.
        model_flops: operations of the model alone, recomputed ones left out, over all ranks.
        tokens: that are trained on, over all ranks.
    """

    parts: dict[str, float]
    hidden_s: float
    model_flops: float
    tokens: float

    @property
    def total_s(self) -> float:
        """Of the step."""
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Over all ranks."""
        return self.tokens / self.total_s

    @property
    def bound_by(self) -> str:
        """The longest part."""
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass(frozen=True)
class Flops:
    """Operations of a rank's step.

    Attributes:
        forward: one forward pass over all of its tokens.
        layers: the same without the output projection: what checkpointing does twice.
    """

    forward: float
    layers: float


def forward_flops(shape: ModelShape, work: Workload, num_ranks: int) -> Flops:
    """Two for each parameter and token, and 4 x width of the heads for each pair of tokens that attention joins.

    Kaplan et al. 2020 (arXiv 2001.08361), table 1. GRPO needs the logits of completions alone.
    """
    tokens = work.samples / num_ranks * work.tokens_per_sample
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * tokens * seen_tokens(work)
    layers = 2 * shape.num_layers * shape.layer.numel * tokens + attention
    share = work.logit_tokens / work.tokens
    if work.fused_loss:
        share *= work.learnt_tokens / work.logit_tokens
    return Flops(layers + 2 * shape.vocab * shape.hidden * tokens * share, layers)


def seen_tokens(work: Workload) -> float:
    """How many tokens a token is compared with, in the mean.

    Half of its sample by kernels that skip what comes after it; sdpa skips nothing once it has a mask.
    """
    return work.tokens_per_sample if has_mask(work) else work.tokens_per_sample / 2


def step_time(shape: ModelShape, work: Workload, cluster: Cluster) -> StepTime:
    """The training part of a step, all its updates."""
    flops = forward_flops(shape, work, cluster.gpus)
    per_second = cluster.hardware.flops * cluster.hardware.compute_share
    num_micro_batches = work.num_micro_batches * work.num_updates
    forward_s = flops.forward / per_second / num_micro_batches
    backward_s = 2 * forward_s + (flops.layers / per_second / num_micro_batches if work.checkpointing else 0)
    exposed = hidden = 0.0
    for number in range(work.num_micro_batches):
        is_first, is_last = number == 0, number == work.num_micro_batches - 1
        gathers, returns = passes(shape, work, cluster, is_first, is_last)
        for compute_s, (behind, alone) in ((forward_s, gathers), (backward_s, returns)):
            exposed += alone + max(behind - compute_s, 0)
            hidden += min(behind, compute_s)
    once_more = work.forward_passes * num_micro_batches
    compute = num_micro_batches * (forward_s + backward_s) + once_more * forward_s
    behind, alone = passes(shape, work, cluster, True, False)[0]
    parts = {
        "compute": compute,
        "communication": exposed * work.num_updates + once_more * (alone + max(behind - forward_s, 0)),
        "optimizer": work.num_updates * optimizer_s(shape, work, cluster),
    }
    tokens = work.samples * work.tokens_per_sample
    return StepTime(parts, hidden * work.num_updates, 3 * flops.forward * cluster.gpus, tokens)


def passes(
    shape: ModelShape, work: Workload, cluster: Cluster, is_first: bool, is_last: bool
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of collectives that layers can hide, and of those that nothing can: forward, then backward.

    FSDP2 gathers a layer while the one before computes, and reduces its gradient while the next computes; the root's
    and the embedding's gathering at the start has nothing before it, and their reduction at the end nothing after it.
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


def optimizer_s(shape: ModelShape, work: Workload, cluster: Cluster) -> float:
    """Memory traffic of the clipping and the update."""
    shard = work.master_bytes * shape.shard_numel(cluster.gpus)
    return ADAMW_PASSES * shard / cluster.hardware.memory_bandwidth
