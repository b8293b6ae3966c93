"""The memory of one rank in each phase of a step that can be the peak.

Sharded state follows ZeRO stage 3 (Rajbhandari et al. 2020, arXiv 1910.02054, section 5). The additional memory of
FSDP2 is derived from torch 2.9's `torch/distributed/fsdp/_fully_shard` for the groups of verl's `apply_fsdp2`: every
decoder layer, the input embedding, and the root with the output projection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_ext.errors import UserError
from verl_ext.files import GIB
from verl_ext.plan.model_shape import ModelShape, ParameterGroup
from verl_ext.plan.workload import DeviceSpec, PlannedConfig, RankWorkload, longest_sample
from verl_ext.trainer.config import chunk_tokens
from verl_ext.trainer.stages import GRPOConfig
from verl_ext.vllm_setup import cpu_cache_bytes

FP32 = 4
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "communication")
"""Weights, gradients and optimizer state are this rank's shards, plus unreduced gradients. Communication is gathered
weights and the buffers of collectives."""
ENGINE_WEIGHTS, KV_CACHE = "engine weights", "KV cache"
"""Additional parts of a rollout engine."""
OTHER = "libraries and freed memory"
"""Additional part of a device with `library_bytes` or `kept_share`."""
Parts = dict[str, float]


@dataclass(frozen=True)
class StepMemory:
    """Bytes by part in each phase of a step."""

    phases: dict[str, Parts]

    @property
    def peak_phase(self) -> str:
        """The phase with the highest total."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> Parts:
        """The parts of the peak phase."""
        return self.phases[self.peak_phase]

    @property
    def peak_bytes(self) -> float:
        """The total of the peak phase."""
        return sum(self.peak.values())


# The loss


def loss_forward_bytes(shape: ModelShape, work: RankWorkload, on_gpu: bool) -> int:
    """Bytes of the forward pass of the loss: logits, those of loss tokens in fp32, and their log-softmax.

    The fused loss holds a chunk's gradient in fp32, with a copy in the dtype of the forward pass. GRPO has logits in
    fp32, and the softmax and the product of the entropy (verl's `entropy_from_logits`).
    """
    compute, tokens = work.compute_bytes, work.loss_tokens
    if work.fused_loss:
        number = FP32 if compute == FP32 else FP32 + compute
        return min(chunk_tokens(shape.vocab, on_gpu), tokens) * shape.vocab * number
    if work.is_grpo:
        return shape.vocab * tokens * 3 * FP32
    in_fp32 = 0 if compute == FP32 else FP32
    return shape.vocab * (work.logit_tokens * compute + tokens * (compute + in_fp32 + FP32))


def loss_backward_bytes(shape: ModelShape, work: RankWorkload) -> int:
    """Maximum bytes of the backward pass of the loss; 0 for the fused loss, whose gradients already exist.

    The maximum of three stages: the log-softmax with an incoming and an outgoing gradient; the gradient in the logits'
    dtype while it is scattered to all tokens; and two gradients of all tokens, where the last token is cut off. GRPO
    has the logits, the gradients of each token's sum of exponentials, one by one and stacked, and the gradient of the
    sampled tokens (`logprobs_from_logits_v2`).
    """
    compute, all_tokens, tokens = work.compute_bytes, work.logit_tokens, work.loss_tokens
    if work.fused_loss:
        return 0
    if work.is_grpo:
        return shape.vocab * tokens * 4 * FP32
    return shape.vocab * max(3 * FP32 * tokens, (tokens + all_tokens) * compute, 2 * all_tokens * compute)


def fused_gradient_bytes(shape: ModelShape, work: RankWorkload) -> int:
    """Bytes of the output projection's gradient in the fused loss, accumulated in fp32 since the forward pass.

    0 if the projection is frozen.
    """
    return FP32 * shape.vocab * shape.hidden if work.fused_loss and not shape.uses_lora else 0


# The phases of an update


class UpdatePhases:
    """The phases of an update: forward and backward passes, reductions, and the optimizer.

    Args:
        shape: shape of the model.
        work: workload of one rank.
        num_ranks: number of ranks that the model is sharded over.
        is_gpu: false for gloo, which copies the input of a reduce-scatter.
    """

    def __init__(self, shape: ModelShape, work: RankWorkload, num_ranks: int, is_gpu: bool) -> None:
        self._shape, self._work, self._num_ranks, self._is_gpu = shape, work, num_ranks, is_gpu
        self._trained = trained = shape.trained
        shard = work.master_bytes * trained.shard_numel(num_ranks)
        accumulates = work.num_micro_batches > 1
        self._sharded_before = shard if accumulates and not work.keeps_gathered else 0.0
        self._whole_before = work.reduce_bytes * trained.numel if accumulates and work.keeps_gathered else 0.0
        self._always: Parts = {
            "weights": work.master_bytes * shape.shard_numel(num_ranks),
            "optimizer": work.num_moments * shard,
            "gradients": self._sharded_before + self._whole_before,
        }
        activations = shape.activations.count(work)
        recomputed = activations.layer if work.checkpointing else 0
        kept = self._hidden_states(work.tokens) if work.checkpointing else activations.layer
        self._saved = shape.num_layers * kept + activations.others
        self._layer_backward = recomputed + activations.layer_backward
        # tanh saves its result
        self._capped = work.compute_bytes * shape.vocab * work.logit_tokens if shape.caps_logits else 0
        self._root, self._embedding, self._layer = (  # gathered
            work.compute_bytes * group.numel for group in (shape.root, shape.embedding, shape.layer)
        )
        self._prefetched = self._layer if num_ranks > 1 else 0  # the next layer's, while one computes
        self._stays_gathered = float(work.compute_bytes * shape.numel) if work.keeps_gathered else 0.0
        adds_in_place = self._whole_before and work.compute_bytes == work.reduce_bytes
        self._root_gradient = 0.0 if adds_in_place else work.compute_bytes * trained.root.numel

    def all(self) -> dict[str, Parts]:
        """Return the parts of each phase, without phases that another one always exceeds."""
        phases = {
            "loss, forward": self._loss(loss_forward_bytes(self._shape, self._work, self._is_gpu) + self._capped),
            "loss, backward": self._loss(loss_backward_bytes(self._shape, self._work) + self._capped),
            "output projection, backward": self._output_projection(),
            "last layer, backward": self._last_layer(),
            "first layer, backward": self._first_layer(),
            "reduction of the root": self._reduction_of_root(),
            "optimizer": self._optimizer(),
        }
        return {
            name: {part: self._always.get(part, 0) + parts.get(part, 0) for part in PARTS}
            for name, parts in phases.items()
        }

    def _loss(self, logits: float) -> Parts:
        """The root is resharded when the model returns its logits, unless weights stay gathered.

        A fused loss runs inside the root, before the last layer's buffer is freed. It holds the output projection, its
        gradient, the gradient of a chunk (except in fp32, where it is added in place), and the hidden states of loss
        tokens with their gradients. CPUs convert the gradient of a chunk to fp32 before they add it.
        """
        shape, work = self._shape, self._work
        if not work.fused_loss:
            return {"activations": self._saved, "logits": logits, "communication": self._stays_gathered}
        is_added_in_place = work.compute_bytes == FP32 or shape.uses_lora
        number = work.compute_bytes if self._is_gpu else work.compute_bytes + FP32
        of_chunk = 0 if is_added_in_place else number * shape.vocab * shape.hidden
        return {
            "activations": self._saved + 2 * self._hidden_states(work.loss_tokens),
            "logits": logits,
            "communication": self._stays_gathered or self._root + self._prefetched,
            "gradients": fused_gradient_bytes(shape, work) + of_chunk,
        }

    def _output_projection(self) -> Parts:
        """The root is gathered again, and the last layer is being gathered.

        The projection's gradient is computed from the gradient of the logits, which the fused loss does not have.
        """
        shape, work = self._shape, self._work
        return {
            "activations": self._saved + self._hidden_states(work.tokens),
            "logits": 0 if work.fused_loss else shape.vocab * work.logit_tokens * work.compute_bytes,
            "gradients": work.compute_bytes * self._trained.root.numel
            + (0 if work.compute_bytes == FP32 else fused_gradient_bytes(shape, work)),
            "communication": self._stays_gathered or self._root + self._prefetched,
        }

    def _last_layer(self) -> Parts:
        """The layer's backward pass while the one before it is being gathered.

        The root's weights and gradient stay to the end: its inputs are token ids, so no input gradient ends its
        backward pass.
        """
        return {
            "activations": self._saved + self._layer_backward,
            "gradients": self._root_gradient,
            "communication": self._stays_gathered or self._root + self._layer + self._prefetched,
        }

    def _first_layer(self) -> Parts:
        """The first layer's backward pass, with the gradients of all other layers and the last reduce-scatter's input.

        Gradients that stay whole are counted before their reduction, in a micro-batch that is not the last.
        """
        shape, work = self._shape, self._work
        activations = self._saved / shape.num_layers + self._layer_backward
        if self._whole_before:
            gradients, communication = self._root_gradient, self._stays_gathered
        else:
            embedding = self._embedding if work.keeps_gathered or self._num_ranks > 1 else 0
            gradients = self._root_gradient + self._reduced_layers(shape.num_layers - 1)
            communication = self._root + self._layer + embedding + work.reduce_bytes * self._trained.layer.numel
        return {"activations": activations, "gradients": gradients, "communication": communication}

    def _reduction_of_root(self) -> Parts:
        """The root is reduced second to last; the embedding's weights are still gathered, and its gradient is whole.

        Counts input and output of the reduce-scatter, and the gradient that its loop over the parameters keeps alive.
        """
        root, work = self._trained.root, self._work
        gradient_bytes = work.reduce_bytes if self._whole_before else work.compute_bytes
        whole, shard = work.reduce_bytes * root.numel, work.reduce_bytes * root.shard_numel(self._num_ranks)
        reducing = whole * (1 if self._is_gpu else 2) + shard + gradient_bytes * root.last_numel
        reduced = self._reduced_layers(self._shape.num_layers) - self._whole_before
        waiting = gradient_bytes * self._trained.embedding.numel
        return {"communication": reducing + self._embedding, "gradients": waiting + reduced}

    def _optimizer(self) -> Parts:
        """All gradients, and the optimizer's temporaries.

        AdamW holds the square roots of all second moments (foreach, `_multi_tensor_adam`), of one parameter's before
        and after a division (for-loop), or none (fused).
        """
        groups, work, size = self._trained.groups, self._work, self._work.master_bytes
        shards = [ParameterGroup((each,)).shard_numel(self._num_ranks) for group in groups for each in group.shapes]
        temporary = {"foreach": sum(shards), "for-loop": 2 * max(shards), "fused": 0}[work.optimizer_implementation]
        gradients = size * sum(shards) - self._sharded_before - self._whole_before
        return {"gradients": gradients, "optimizer": size * temporary}

    def _hidden_states(self, tokens: int) -> float:
        return tokens * self._shape.hidden * self._work.compute_bytes

    def _reduced_layers(self, count: int) -> float:
        """Gradient shards of layers; 0 if those of an earlier micro-batch exist, which are already counted."""
        shard = self._work.master_bytes * self._trained.layer.shard_numel(self._num_ranks)
        return 0 if self._sharded_before else count * shard


# Rollouts


def engine_ranks(config: GRPOConfig) -> int:
    """Number of ranks that share a rollout engine."""
    return config.rollout.tensor_model_parallel_size if config.rollout.engine == "vllm" else 1


def check_engine_ranks(config: GRPOConfig, shape: ModelShape) -> None:
    """Refuse a number of ranks over which vLLM cannot divide the model's attention heads."""
    size, heads = engine_ranks(config), range(1, shape.num_heads + 1)
    if not shape.splits_heads(size):
        raise UserError(
            f"rollout.tensor_model_parallel_size is {size}, over which vLLM cannot divide the {shape.num_heads} "
            f"attention heads and {shape.num_kv_heads} key-value heads of {shape.model_type}; set it to one of "
            f"{', '.join(str(each) for each in heads if shape.splits_heads(each))}"
        )


def kv_token_bytes(config: GRPOConfig, shape: ModelShape, work: RankWorkload) -> int:
    """Bytes of one token's keys and values on one rank of the engine."""
    return shape.kv_numel(engine_ranks(config)) * work.cache_bytes


def engine_parts(
    config: GRPOConfig, shape: ModelShape, work: RankWorkload, num_ranks: int, device: DeviceSpec
) -> Parts:
    """Memory of the engine while it generates.

    On a GPU, vLLM reserves `gpu_memory_utilization`; the part that weights do not use is its cache and working memory.
    On a CPU, vLLM's cache has a fixed size. transformers generates with gathered layers, and its cache is as large as
    the concurrent completions need.
    """
    rollout = config.rollout
    if rollout.engine != "vllm":
        size, concurrent = work.compute_bytes, min(rollout.max_num_seqs, work.samples / num_ranks)
        tokens = concurrent * longest_sample(config)
        return {ENGINE_WEIGHTS: size * shape.numel, KV_CACHE: tokens * shape.kv_numel() * size}
    weights = work.engine_bytes * shape.numel / rollout.tensor_model_parallel_size
    if not device.is_gpu:
        return {ENGINE_WEIGHTS: weights, KV_CACHE: cpu_cache_bytes()}
    return {ENGINE_WEIGHTS: weights, KV_CACHE: max(rollout.gpu_memory_utilization * device.memory_bytes - weights, 0.0)}


def engine_shortage(config: GRPOConfig, shape: ModelShape, work: RankWorkload, device: DeviceSpec) -> str:
    """Say why vLLM cannot start on these GPUs; empty if it can.

    vLLM refuses to start if the weights and the cache of one sequence of maximum length do not fit into its share of
    the GPU (`check_enough_kv_cache_memory`).
    """
    rollout, longest = config.rollout, longest_sample(config)
    share = rollout.gpu_memory_utilization * device.memory_bytes
    weights = work.engine_bytes * shape.numel / rollout.tensor_model_parallel_size
    cache = longest * kv_token_bytes(config, shape, work)
    if rollout.engine != "vllm" or not device.is_gpu or weights + cache <= share:
        return ""
    return (
        f"vLLM cannot start with rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g}, which is "
        f"{share / GIB:.1f} GiB of a GPU: it needs {weights / GIB:.1f} GiB for its weights and {cache / GIB:.1f} GiB "
        f"for the cache of one sequence of {longest} tokens"
    )


def rollout_phase(
    config: GRPOConfig, shape: ModelShape, work: RankWorkload, num_ranks: int, engine: Parts, is_gpu: bool
) -> Parts:
    """Return the parts of a rollout: trained weights, optimizer moments, engine, and a bucket of weights in transit."""
    sent = 0.0
    if config.rollout.engine == "vllm":
        largest = max(math.prod(each) for group in shape.groups for each in group.shapes) * work.engine_bytes
        bucket = max(config.rollout.bucket_bytes(on_cpu=not is_gpu), largest)
        sent = min(bucket, shape.numel * work.engine_bytes) * (1 + 1 / num_ranks)
    weights, trained = (work.master_bytes * each.shard_numel(num_ranks) for each in (shape, shape.trained))
    return {"weights": weights, "optimizer": work.num_moments * trained, **engine, "communication": sent}


def step_memory(
    config: PlannedConfig, shape: ModelShape, work: RankWorkload, num_ranks: int, device: DeviceSpec
) -> StepMemory:
    """Predict the memory of one rank in every phase of a step."""
    phases = UpdatePhases(shape, work, num_ranks, device.is_gpu).all()
    if isinstance(config, GRPOConfig):
        engine = engine_parts(config, shape, work, num_ranks, device)
        sleeps = config.rollout.free_cache_engine and device.is_gpu
        if config.rollout.engine == "vllm" and not sleeps:
            phases = {name: {**parts, **engine} for name, parts in phases.items()}
        phases["rollout"] = rollout_phase(config, shape, work, num_ranks, engine, device.is_gpu)
    if device.library_bytes or device.kept_share:
        for parts in phases.values():
            kept = device.kept_share * (parts.get("activations", 0) + parts.get("logits", 0))
            parts[OTHER] = device.library_bytes + kept
    return StepMemory(phases)
