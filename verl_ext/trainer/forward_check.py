"""Whether a model does what packing and the fused loss take for granted; asked of the model itself, at the start.

No list of architectures says it: a model of a user's own may scale its logits, or carry a state from sample to sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F

from verl_ext.data.batching import MicroBatch, pack
from verl_ext.trainer.packed_attention import PackingUnsupportedError

LENGTHS = (7, 5, 9)
"""Of the samples that are tried."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference allowed, in standard deviations of the logits."""
LOSS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Nats per token by which the fused loss may differ from that of the logits, which are rounded."""
Forward = Callable[[MicroBatch], torch.Tensor]


def trial_samples(vocab_size: int) -> list[dict]:
    """Samples of random tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]
    return [{"input_ids": ids, "loss_mask": torch.ones_like(ids)} for ids in tokens]


@torch.no_grad()
def why_not_packed(logits_of: Forward, vocab_size: int, precision: torch.dtype) -> str | None:
    """Why the samples of a micro-batch cannot share a row: what the model does, without its name. Collective.

    Args:
        logits_of: gives the logits (1, tokens, vocab) of a packed micro-batch.
        vocab_size: of the model.
        precision: of the forward pass.

    Returns:
        None where packed samples have the logits that each has alone.
    """
    samples = trial_samples(vocab_size)
    try:
        alone = torch.cat([logits_of(pack([sample])) for sample in samples], dim=1).float()
        together = logits_of(pack(samples)).float()
    except PackingUnsupportedError as error:
        return str(error)
    except (TypeError, ValueError):  # from the model's own code, which has no parameter for the boundaries
        return "does not accept the boundaries of packed samples"
    apart, spread = float((together - alone).abs().max()), float(alone.std())
    if not spread > 0 or not math.isfinite(apart):
        return "gives logits that are all equal or not finite, so packing cannot be verified"
    if apart > TOLERANCE[precision] * spread:
        return "does not keep packed samples apart"
    return None


@torch.no_grad()
def loss_heads_error(
    logits_of: Forward, loss_of: Forward, make: Callable[[list], MicroBatch], vocab_size: int
) -> float:
    """By how much the fused loss differs from the cross-entropy of the logits, per token; collective.

    Args:
        logits_of: gives the logits (batch, seq, vocab) of a micro-batch.
        loss_of: gives its summed loss.
        make: a micro-batch of a sample.
        vocab_size: of the model.
    """
    micro_batch = make(trial_samples(vocab_size)[:1])
    logits, targets = logits_of(micro_batch)[0, :-1].float(), micro_batch["input_ids"][0, 1:]
    plain = F.cross_entropy(logits, targets.to(logits.device), reduction="sum")
    return float((loss_of(micro_batch).float() - plain).abs()) / len(targets)
