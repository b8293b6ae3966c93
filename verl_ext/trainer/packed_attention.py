"""Attention over samples that lie behind each other in one row, each of which sees itself alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

PACKED_SDPA = "packed_sdpa"
"""Name of `packed_sdpa` among the attention functions of transformers."""


class PackingUnsupportedError(ValueError):
    """A model's attention cannot run over packed samples; the message is what it does, without its name."""


class SampleLengths:
    """Tokens of each sample of a row.

    Neither a list nor a dataclass: torch.compile looks into these, and would compile anew for each number of samples.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens


def packed_arguments(sample_lengths: torch.Tensor, device: torch.device | str) -> dict[str, Any]:
    """What a forward pass of transformers is told of a packed row, for flash-attention and for `packed_sdpa`.

    Args:
        sample_lengths: tokens of each sample (num_samples,), on the CPU.
        device: of the model.
    """
    borders = F.pad(sample_lengths.cumsum(0), (1, 0)).to(device, dtype=torch.int32, non_blocking=True)
    longest = int(sample_lengths.max())
    return {
        **{"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest},
        "sample_lengths": SampleLengths(sample_lengths.tolist()),
    }


@torch.compiler.disable  # the number of samples and their lengths differ from row to row
def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    sample_lengths: SampleLengths | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention, sample by sample: without padding, and without a mask whose size is the row's squared.

    Args:
        module: the attention layer.
        query: (1, heads, tokens, head_dim).
        key: (1, kv_heads, tokens, head_dim).
        value: as `key`.
        attention_mask: none; `sample_lengths` say the same.
        sample_lengths: of the row; None if the model's layers do not pass them on.
        scaling: of the scores.
        dropout: of the weights.
        sliding_window: tokens that one sees, itself included; None for all before it.
        softcap: of the scores; sdpa has none.
        s_aux: attention sinks; sdpa has none.

    Returns:
        The values (1, tokens, heads, head_dim), and no weights.

    Raises:
        PackingUnsupportedError: the model does not pass the samples' lengths, or asks for what sdpa does not have.
    """
    if sample_lengths is None:
        raise PackingUnsupportedError("does not pass the boundaries of packed samples to its attention")
    if softcap is not None or s_aux is not None:
        raise PackingUnsupportedError("caps attention scores or has attention sinks, which sdpa does not support")
    arguments: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1]}
    parts = [
        F.scaled_dot_product_attention(q, k, v, **_causal(q.shape[2], sliding_window, query.device), **arguments)
        for q, k, v in zip(*(tensor.split(sample_lengths.tokens, dim=2) for tensor in (query, key, value)))
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _causal(length: int, sliding_window: int | None, device: torch.device) -> dict[str, Any]:
    """How a sample of `length` tokens sees itself."""
    if sliding_window is None or length <= sliding_window:
        return {"is_causal": True}
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return {"attn_mask": ones.tril() & ones.triu(1 - sliding_window)}


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, _no_mask)
