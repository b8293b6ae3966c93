"""What is asked of a causal language model beside its forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from peft import PeftModel
from transformers import PretrainedConfig, PreTrainedModel

from verl_ext.checkpoint.hf_tensors import unwrap_peft

_KEEP = "logits_to_keep"


def logits_of_last(model: PreTrainedModel | PeftModel, length: int) -> dict[str, int]:
    """The argument of a forward pass that has no logits computed but the last ones; none where it has no such thing."""
    return {_KEEP: length} if _KEEP in inspect.signature(type(unwrap_peft(model)).forward).parameters else {}


def takes_cache(model: PreTrainedModel) -> bool:
    """Whether its forward pass goes on from a cache of transformers' common kind; that of Mamba has its own."""
    has_common_one = "past_key_values" in inspect.signature(type(model).forward).parameters
    return has_common_one and model._supports_default_dynamic_cache()


CAN_SHARE = ("gemma", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
"""Architectures whose attention is all by the mask and the positions that they are given; a test holds each to it."""


def forward_cost(model: PreTrainedModel | PeftModel) -> Callable[[int, int], float] | None:
    """Operations of a forward pass by rows and their length, for a model whose rows may hold several completions.

    Twice the parameters for each token, and 4 x layers x width of the heads for each pair of tokens of a row, since a
    mask of one's own spares none of them (Kaplan et al. 2020, arXiv 2001.08361, table 1).

    Returns:
        None for a model that takes no mask of one's own, or that sees only some of the tokens before.
    """
    config = unwrap_peft(model).config
    takes_mask = config._attn_implementation == "sdpa" and config.model_type in CAN_SHARE
    if not takes_mask or any(kind != "full_attention" for kind in _layer_types(config)):
        return None
    per_token = 2 * unwrap_peft(model).num_parameters(exclude_embeddings=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_pair = 4 * config.num_hidden_layers * config.num_attention_heads * head_dim
    return lambda num_rows, length: num_rows * length * (per_token + per_pair * length)


def _layer_types(config: PretrainedConfig) -> list[str]:
    """Each layer's kind of attention, where some may see only a window."""
    named = getattr(config, "layer_types", None)
    if named is not None:
        return list(named)
    return ["sliding_attention" if getattr(config, "sliding_window", None) is not None else "full_attention"]
