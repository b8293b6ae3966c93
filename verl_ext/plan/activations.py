"""Bytes of what the forward pass keeps for the backward pass, counted in transformers' decoder layer.

After Korthikanti et al. 2022 (arXiv 2205.05198), section 4, whose count is of a GPT layer with dropout: each tensor
that autograd saves is counted once, with the bytes of a number as transformers computes it. Llama, Qwen2 and Qwen3
differ from it by RMSNorm (in fp32 whatever the layer computes in), rotary embedding, grouped keys and values, SwiGLU
and attention that keeps no scores. A test compares the count with what autograd saves.
"""

from __future__ import annotations

from verl_ext.plan.shape import ModelShape
from verl_ext.plan.workload import Workload
from verl_ext.trainer.config import CHUNK_ELEMENTS, MIN_CHUNK_TOKENS

FP32 = 4


def norm_bytes(compute: int, width: int, feeds_linear: bool = True) -> int:
    """Of one token: the input in fp32, the normalised value, and the result where a matrix product needs it."""
    return width * (FP32 + compute + (compute if feeds_linear else 0)) + FP32


def layer_bytes(shape: ModelShape, work: Workload) -> int:
    """One decoder layer, all of it kept.

    Two norms; queries, keys, values and the result of attention, with the logarithm of the softmax's denominator; four
    tensors of the SwiGLU: gate, its SiLU, up, and the product.
    """
    compute, heads = work.compute_bytes, shape.num_heads
    query, key = heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # sdpa takes grouped keys and values only without a mask; else transformers repeats them for every head
    kept_key = key if work.is_flash or not (work.is_padded or work.is_eager) else query
    norms = 2 * norm_bytes(compute, shape.hidden)
    if shape.has_qk_norm:
        norms += norm_bytes(compute, query, feeds_linear=False) + norm_bytes(compute, key, feeds_linear=False)
    attention = compute * (2 * query + 2 * kept_key) + FP32 * heads
    if work.is_packed and not work.is_flash:  # sdpa runs sample by sample, and the results are put together
        attention += compute * query
    if has_mask(work):  # sdpa makes numbers of the mask, anew in every layer, and keeps them
        attention += compute * work.row_tokens
    if work.is_eager:  # the softmax in fp32, and what is multiplied with the values
        attention += heads * work.row_tokens * (FP32 + (compute if compute != FP32 else 0))
    return work.tokens * (norms + attention + 4 * compute * shape.intermediate)


def kept_bytes(shape: ModelShape, work: Workload) -> int:
    """All that lives when the forward pass has ended, logits left out: the layers' tensors, and the last norm's.

    With gradient checkpointing a layer keeps its input alone.
    """
    of_layer = work.tokens * shape.hidden * work.compute_bytes if work.checkpointing else layer_bytes(shape, work)
    rotary = 2 * work.tokens * shape.head_dim * work.compute_bytes
    mask = work.tokens * work.row_tokens if has_mask(work) else 0  # a byte for each pair of tokens of a row
    return shape.num_layers * of_layer + work.tokens * norm_bytes(work.compute_bytes, shape.hidden) + rotary + mask


def has_mask(work: Workload) -> bool:
    """Whether sdpa is given a mask of all pairs, as it is where rows are padded."""
    return work.is_padded and not work.is_flash and not work.is_eager


def backward_bytes(shape: ModelShape, work: Workload) -> int:
    """What the backward pass of a layer holds beside what was kept, where it is most: in the SwiGLU.

    Two gradients of the intermediate width before what they are made of is freed, the gradient of the layer's output,
    and that of the down projection's weight.
    """
    compute = work.compute_bytes
    gradients = work.tokens * compute * (2 * shape.intermediate + shape.hidden)
    return gradients + compute * shape.hidden * shape.intermediate


def loss_forward_bytes(shape: ModelShape, work: Workload) -> int:
    """Logits and cross-entropy: the logits, those of learnt tokens gathered, in fp32, and their log-softmax.

    The fused loss holds a chunk's gradient in fp32, with a copy in the type of the forward pass. GRPO has logits in
    fp32, and the entropy's softmax and product beside them (verl's `entropy_from_logits`).
    """
    compute, learnt = work.compute_bytes, work.learnt_tokens
    if work.fused_loss:
        return chunk_tokens(shape, work) * shape.vocab * (FP32 if compute == FP32 else FP32 + compute)
    if work.is_grpo:
        return shape.vocab * learnt * 3 * FP32
    in_fp32 = 0 if compute == FP32 else FP32
    return shape.vocab * (work.logit_tokens * compute + learnt * (compute + in_fp32 + FP32))


def loss_backward_bytes(shape: ModelShape, work: Workload) -> int:
    """The largest of the backward pass through the loss; the fused loss has none, as it made its gradients before.

    The log-softmax, the gradient that comes and the one that goes; then the gradient in the logits' type while it is
    scattered to all tokens; then two of all tokens where the last one is cut off. GRPO has the logits, the gradients of
    each token's sum of exponentials one by one and stacked, and that of the chosen tokens (`logprobs_from_logits_v2`).
    """
    compute, tokens, learnt = work.compute_bytes, work.logit_tokens, work.learnt_tokens
    if work.fused_loss:
        return 0
    if work.is_grpo:
        return shape.vocab * learnt * 4 * FP32
    return shape.vocab * max(3 * FP32 * learnt, (learnt + tokens) * compute, 2 * tokens * compute)


def logits_gradient_bytes(shape: ModelShape, work: Workload) -> int:
    """The gradient of the logits, from which the output projection's is made."""
    return 0 if work.fused_loss else shape.vocab * work.logit_tokens * work.compute_bytes


def chunk_tokens(shape: ModelShape, work: Workload) -> int:
    """Tokens whose logits the fused loss makes at a time."""
    return min(max(MIN_CHUNK_TOKENS, CHUNK_ELEMENTS // shape.vocab), work.learnt_tokens)


def fused_gradient_bytes(shape: ModelShape, work: Workload) -> int:
    """The fused loss's gradient of the output projection, added up in fp32 from the forward pass on."""
    return FP32 * shape.vocab * shape.hidden if work.fused_loss else 0
