"""The memory of one rank in each phase of a step that can be the peak.

Activations are counted after Korthikanti et al. 2022 (arXiv 2205.05198), section 4, whose count is of a GPT layer with
dropout: each tensor that autograd saves counts once, with the bytes per number that transformers computes it in. Llama,
Qwen2 and Qwen3 differ from GPT by RMSNorm (in fp32 in any case), rotary embedding, grouped keys and values, SwiGLU, and
attention that keeps no scores. A test compares the count with what autograd saves.

Sharded state follows ZeRO stage 3 (Rajbhandari et al. 2020, arXiv 1910.02054, section 5). What FSDP2 holds in addition,
and when, is read from torch 2.9's `torch/distributed/fsdp/_fully_shard` for the groups that verl's `apply_fsdp2` makes:
every decoder layer, the input embedding, and the root with the output projection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_ext.files import GIB
from verl_ext.plan.model_shape import ModelShape, ParameterGroup
from verl_ext.plan.workload import DeviceSpec, PlannedConfig, RankWorkload, longest_sample
from verl_ext.trainer.config import chunk_tokens
from verl_ext.trainer.stages import GRPOConfig

FP32 = 4
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "communication")
"""Weights, gradients and optimizer state are this rank's shards, with gradients that are not reduced yet; gathered
weights and the buffers of collectives are communication."""
ENGINE_WEIGHTS, KV_CACHE = "engine weights", "KV cache"
"""Further parts, of a rollout engine."""
Parts = dict[str, float]


@dataclass(frozen=True)
class StepMemory:
    """Bytes by part in each phase of a step."""

    phases: dict[str, Parts]

    @property
    def peak_phase(self) -> str:
        """The phase that holds most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> Parts:
        """The parts of that phase."""
        return self.phases[self.peak_phase]

    @property
    def peak_bytes(self) -> float:
        """Their sum."""
        return sum(self.peak.values())


# Activations


def norm_bytes(compute: int, width: int, feeds_linear: bool = True) -> int:
    """One token of an RMSNorm: the input in fp32, the normalized value, and the result if a matrix product saves it."""
    return width * (FP32 + compute + (compute if feeds_linear else 0)) + FP32


def layer_bytes(shape: ModelShape, work: RankWorkload) -> int:
    """Everything that one decoder layer saves.

    Two norms; queries, keys, values and the result of attention, with the logarithm of the softmax's denominator; four
    tensors of the SwiGLU: gate, its SiLU, up, and the product.
    """
    compute, heads = work.compute_bytes, shape.num_heads
    query, key = heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # sdpa takes grouped keys and values only without a mask; otherwise transformers repeats them for every head
    saved_key = query if work.attention in ("masked", "eager") else key
    norms = 2 * norm_bytes(compute, shape.hidden)
    if shape.has_qk_norm:
        norms += norm_bytes(compute, query, feeds_linear=False) + norm_bytes(compute, key, feeds_linear=False)
    attention = compute * (2 * query + 2 * saved_key) + FP32 * heads
    if work.attention == "packed":  # sdpa runs sample by sample, and the results are concatenated
        attention += compute * query
    if work.attention == "masked":  # sdpa turns the mask into numbers in every layer, and saves them
        attention += compute * work.row_tokens
    if work.attention == "eager":  # the softmax in fp32, and what is multiplied with the values
        attention += heads * work.row_tokens * (FP32 + (compute if compute != FP32 else 0))
    return work.tokens * (norms + attention + 4 * compute * shape.intermediate)


def activation_bytes(shape: ModelShape, work: RankWorkload) -> int:
    """All that is saved when the forward pass ends, except logits: the layers' tensors, and the last norm's.

    With gradient checkpointing, a layer saves only its input.
    """
    per_layer = work.tokens * shape.hidden * work.compute_bytes if work.checkpointing else layer_bytes(shape, work)
    rotary = 2 * work.tokens * shape.head_dim * work.compute_bytes
    mask = work.tokens * work.row_tokens if work.attention == "masked" else 0  # a byte per pair of tokens of a row
    return shape.num_layers * per_layer + work.tokens * norm_bytes(work.compute_bytes, shape.hidden) + rotary + mask


def backward_bytes(shape: ModelShape, work: RankWorkload) -> int:
    """What the backward pass of a layer holds beyond saved tensors, at its maximum, in the SwiGLU.

    Two gradients of the intermediate width before the tensors they come from are freed, the gradient of the layer's
    output, and that of the down projection's weight.
    """
    compute = work.compute_bytes
    gradients = work.tokens * compute * (2 * shape.intermediate + shape.hidden)
    return gradients + compute * shape.hidden * shape.intermediate


# The loss


def loss_forward_bytes(shape: ModelShape, work: RankWorkload, on_gpu: bool) -> int:
    """Logits and cross-entropy: the logits, those of loss tokens selected, in fp32, and their log-softmax.

    The fused loss holds a chunk's gradient in fp32, with a copy in the type of the forward pass. GRPO has logits in
    fp32, with the softmax and the product of the entropy (verl's `entropy_from_logits`).
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
    """The maximum during the backward pass through the loss; the fused loss has none, as its gradients exist already.

    The log-softmax with an incoming and an outgoing gradient; then the gradient in the logits' type while it is
    scattered to all tokens; then two gradients of all tokens, where the last token is cut off. GRPO has the logits, the
    gradients of each token's sum of exponentials one by one and stacked, and that of the sampled tokens
    (`logprobs_from_logits_v2`).
    """
    compute, all_tokens, tokens = work.compute_bytes, work.logit_tokens, work.loss_tokens
    if work.fused_loss:
        return 0
    if work.is_grpo:
        return shape.vocab * tokens * 4 * FP32
    return shape.vocab * max(3 * FP32 * tokens, (tokens + all_tokens) * compute, 2 * all_tokens * compute)


def fused_gradient_bytes(shape: ModelShape, work: RankWorkload) -> int:
    """The fused loss's gradient of the output projection, accumulated in fp32 from the forward pass on."""
    return FP32 * shape.vocab * shape.hidden if work.fused_loss else 0


# The phases of an update


class UpdatePhases:
    """The phases of an update: forward and backward passes, reductions, and the optimizer.

    Args:
        shape: of the model.
        work: of one rank.
        num_ranks: that the model is sharded over.
        is_gpu: otherwise gloo, which copies the input of a reduce-scatter.
    """

    def __init__(self, shape: ModelShape, work: RankWorkload, num_ranks: int, is_gpu: bool) -> None:
        self._shape, self._work, self._num_ranks, self._is_gpu = shape, work, num_ranks, is_gpu
        shard = work.master_bytes * shape.shard_numel(num_ranks)
        accumulates = work.num_micro_batches > 1
        self._sharded_before = shard if accumulates and not work.keeps_gathered else 0.0
        self._whole_before = work.reduce_bytes * shape.numel if accumulates and work.keeps_gathered else 0.0
        self._always: Parts = {"weights": shard, "optimizer": 2 * shard}
        self._always["gradients"] = self._sharded_before + self._whole_before
        self._saved = activation_bytes(shape, work)
        recomputed = layer_bytes(shape, work) if work.checkpointing else 0
        self._layer_backward = recomputed + backward_bytes(shape, work)
        self._root, self._embedding, self._layer = (  # gathered
            work.compute_bytes * group.numel for group in (shape.root, shape.embedding, shape.layer)
        )
        self._prefetched = self._layer if num_ranks > 1 else 0  # the next layer's, while one computes
        self._stays_gathered = float(work.compute_bytes * shape.numel) if work.keeps_gathered else 0.0
        adds_in_place = self._whole_before and work.compute_bytes == work.reduce_bytes
        self._root_gradient = 0.0 if adds_in_place else self._root

    def all(self) -> dict[str, Parts]:
        """The parts of each phase. Phases that another one always exceeds are left out."""
        phases = {
            "loss, forward": self._loss(loss_forward_bytes(self._shape, self._work, self._is_gpu)),
            "loss, backward": self._loss(loss_backward_bytes(self._shape, self._work)),
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
        gradient, a chunk's part of it (in fp32 the product is added in place), and the hidden states of loss tokens
        with their gradients.
        """
        shape, work = self._shape, self._work
        if not work.fused_loss:
            return {"activations": self._saved, "logits": logits, "communication": self._stays_gathered}
        of_chunk = 0 if work.compute_bytes == FP32 else work.compute_bytes * shape.vocab * shape.hidden
        return {
            "activations": self._saved + 2 * self._hidden_states(work.loss_tokens),
            "logits": logits,
            "communication": self._stays_gathered or self._root + self._prefetched,
            "gradients": fused_gradient_bytes(shape, work) + of_chunk,
        }

    def _output_projection(self) -> Parts:
        """The root is gathered again, and the last layer is being gathered.

        The projection's gradient is computed from that of the logits, which the fused loss does not have.
        """
        shape, work = self._shape, self._work
        return {
            "activations": self._saved + self._hidden_states(work.tokens),
            "logits": 0 if work.fused_loss else shape.vocab * work.logit_tokens * work.compute_bytes,
            "gradients": self._root + (0 if work.compute_bytes == FP32 else fused_gradient_bytes(shape, work)),
            "communication": self._stays_gathered or self._root + self._prefetched,
        }

    def _last_layer(self) -> Parts:
        """The layer's backward pass while the one before it is being gathered.

        The root's weights and gradient stay to the end: its inputs are token ids, so no gradient reaches them that
        would end its backward pass.
        """
        return {
            "activations": self._saved + self._layer_backward,
            "gradients": self._root_gradient,
            "communication": self._stays_gathered or self._root + self._layer + self._prefetched,
        }

    def _first_layer(self) -> Parts:
        """The same at the other end, with the gradients of all other layers, and the last reduce-scatter's input.

        Gradients that stay whole are counted before their reduction, in a micro-batch that is not the last.
        """
        shape, work = self._shape, self._work
        activations = self._saved / shape.num_layers + self._layer_backward
        if self._whole_before:
            gradients, communication = self._root_gradient, self._stays_gathered
        else:
            embedding = self._embedding if work.keeps_gathered or self._num_ranks > 1 else 0
            gradients = self._root_gradient + self._reduced_layers(shape.num_layers - 1)
            communication = self._root + self._layer + embedding + work.reduce_bytes * shape.layer.numel
        return {"activations": activations, "gradients": gradients, "communication": communication}

    def _reduction_of_root(self) -> Parts:
        """The root is reduced last but one; the embedding's weights are still gathered, and its gradient is whole.

        The input and the output of the reduce-scatter, and the gradient that its loop over the parameters keeps alive.
        """
        root, work = self._shape.root, self._work
        gradient_bytes = work.reduce_bytes if self._whole_before else work.compute_bytes
        whole, shard = work.reduce_bytes * root.numel, work.reduce_bytes * root.shard_numel(self._num_ranks)
        reducing = whole * (1 if self._is_gpu else 2) + shard + gradient_bytes * root.last_numel
        reduced = self._reduced_layers(self._shape.num_layers) - self._whole_before
        waiting = gradient_bytes * self._shape.embedding.numel
        return {"communication": reducing + self._embedding, "gradients": waiting + reduced}

    def _optimizer(self) -> Parts:
        """All gradients, and the optimizer's temporaries.

        AdamW holds the square roots of all second moments at a time (foreach, `_multi_tensor_adam`), those of one
        parameter, before and after a division (for-loop), or none (fused).
        """
        groups, work, size = self._shape.groups, self._work, self._work.master_bytes
        shards = [ParameterGroup((each,)).shard_numel(self._num_ranks) for group in groups for each in group.shapes]
        temporary = {"foreach": sum(shards), "for-loop": 2 * max(shards), "fused": 0}[work.optimizer_implementation]
        gradients = size * sum(shards) - self._sharded_before - self._whole_before
        return {"gradients": gradients, "optimizer": size * temporary}

    def _hidden_states(self, tokens: int) -> float:
        return tokens * self._shape.hidden * self._work.compute_bytes

    def _reduced_layers(self, count: int) -> float:
        """Gradient shards of layers, unless those of an earlier micro-batch exist, which are counted already."""
        shard = self._work.master_bytes * self._shape.layer.shard_numel(self._num_ranks)
        return 0 if self._sharded_before else count * shard


# Rollouts


def kv_token_bytes(config: GRPOConfig, shape: ModelShape, work: RankWorkload) -> float:
    """One token's keys and values on one rank of the engine."""
    return shape.kv_numel * work.engine_bytes / config.rollout.tensor_model_parallel_size


def engine_parts(
    config: GRPOConfig, shape: ModelShape, work: RankWorkload, num_ranks: int, device: DeviceSpec
) -> Parts:
    """Memory of the engine while it generates.

    On a GPU vLLM takes `gpu_memory_utilization`, and what weights leave of it is its cache and working memory. On a CPU
    the cache is what the concurrent completions need. transformers generates with gathered layers.
    """
    rollout = config.rollout
    tokens = min(rollout.max_num_seqs, work.samples / num_ranks) * longest_sample(config)  # of concurrent completions
    if rollout.engine != "vllm":
        size = work.compute_bytes
        return {ENGINE_WEIGHTS: size * shape.numel, KV_CACHE: tokens * shape.kv_numel * size}
    weights = work.engine_bytes * shape.numel / rollout.tensor_model_parallel_size
    if not device.is_gpu:
        return {ENGINE_WEIGHTS: weights, KV_CACHE: tokens * kv_token_bytes(config, shape, work)}
    return {ENGINE_WEIGHTS: weights, KV_CACHE: max(rollout.gpu_memory_utilization * device.memory_bytes - weights, 0.0)}


def engine_shortage(config: GRPOConfig, shape: ModelShape, work: RankWorkload, device: DeviceSpec) -> str:
    """Why vLLM cannot start on these GPUs; empty if it can.

    vLLM refuses to start if its share of the GPU does not hold the weights and the cache of one sequence of the longest
    length (`check_enough_kv_cache_memory`).
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


def rollout_phase(config: GRPOConfig, shape: ModelShape, work: RankWorkload, num_ranks: int, engine: Parts) -> Parts:
    """The trained weights, the optimizer's moments, the engine, and a bucket of weights in transit to it."""
    shard = work.master_bytes * shape.shard_numel(num_ranks)
    bucket = 0.0
    if config.rollout.engine == "vllm":
        largest = max(math.prod(each) for group in shape.groups for each in group.shapes) * work.engine_bytes
        bucket = max(config.rollout.update_weights_bucket_megabytes * 2**20, largest) * (1 + 1 / num_ranks)
    return {"weights": shard, "optimizer": 2 * shard, **engine, "communication": bucket}


def step_memory(
    config: PlannedConfig, shape: ModelShape, work: RankWorkload, num_ranks: int, device: DeviceSpec
) -> StepMemory:
    """The memory of one rank in every phase of a step."""
    phases = UpdatePhases(shape, work, num_ranks, device.is_gpu).all()
    if isinstance(config, GRPOConfig):
        engine = engine_parts(config, shape, work, num_ranks, device)
        sleeps = config.rollout.free_cache_engine and device.is_gpu
        if config.rollout.engine == "vllm" and not sleeps:
            phases = {name: {**parts, **engine} for name, parts in phases.items()}
        phases["rollout"] = rollout_phase(config, shape, work, num_ranks, engine)
    return StepMemory(phases)
