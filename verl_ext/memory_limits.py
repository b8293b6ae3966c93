"""Memory limits of the trainers, which `verl_ext.plan` needs for its predictions too."""

GATHERED_SHARE = 0.15
"""Share of the memory for unsharded weights and gradients with `model.fsdp_config.keep_gathered=auto`."""
CHUNK_ELEMENTS = 1 << 24
"""Logits that the fused loss holds at a time: 64 MiB of fp32, or 110 tokens of a vocabulary of 152,000."""
MIN_CHUNK_TOKENS = 128
"""Tokens of a chunk of logits, at least; matrix products of fewer rows are slow."""
